"""The examples for KEDA: their shape here, their triggers against a running server in the integration tests."""

import os
import unittest

import yaml

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
# What KEDA reads in a trigger of type external, and what the server does; the table in deploy/metrics.md lists the latter.
KEDA_KEYS = {"scalerAddress", "enableTLS", "unsafeSsl"}
AUTH_PARAMETERS = {"caCert", "tlsClientCert", "tlsClientKey"}


def text(*path):
    with open(os.path.join(ROOT, *path), encoding="utf-8") as file:
        return file.read()


def documents(kind):
    every = yaml.safe_load_all(text("deploy", "keda", "scaledobject.yaml"))
    return [item for item in every if item["kind"] == kind]


class Keda(unittest.TestCase):
    def test_every_object_has_the_shape_that_keda_reads(self):
        objects = documents("ScaledObject")
        self.assertEqual(len(objects), 2)
        for item in objects:
            with self.subTest(name=item["metadata"]["name"]):
                self.assertEqual(item["apiVersion"], "keda.sh/v1alpha1")
                self.assertLessEqual(
                    set(item["spec"]),
                    {"scaleTargetRef", "minReplicaCount", "maxReplicaCount", "pollingInterval", "cooldownPeriod", "triggers"},
                )
                self.assertLess(item["spec"]["minReplicaCount"], item["spec"]["maxReplicaCount"])
                for trigger in item["spec"]["triggers"]:
                    self.assertIn(trigger["type"], ("external", "external-push"))
                    self.assertLessEqual(set(trigger), {"type", "metadata", "authenticationRef"})
                    # The API server refuses metadata that is no text.
                    self.assertEqual({type(value) for value in trigger["metadata"].values()}, {str})

    def test_triggers_use_keys_that_are_documented(self):
        table = text("deploy", "metrics.md").split("## Scaling consumers")[1]
        for item in documents("ScaledObject"):
            for trigger in item["spec"]["triggers"]:
                for key in set(trigger["metadata"]) - KEDA_KEYS:
                    with self.subTest(key=key):
                        self.assertIn(f"`{key}`", table)

    def test_authentication_is_the_one_that_triggers_name(self):
        known = {item["metadata"]["name"]: item for item in documents("TriggerAuthentication")}
        named = [
            trigger["authenticationRef"]["name"]
            for item in documents("ScaledObject")
            for trigger in item["spec"]["triggers"]
            if "authenticationRef" in trigger
        ]
        self.assertEqual(set(named), set(known))
        for item in known.values():
            self.assertEqual({entry["parameter"] for entry in item["spec"]["secretTargetRef"]}, AUTH_PARAMETERS)

    def test_addresses_are_those_of_the_chart_s_service(self):
        port = yaml.safe_load(text("deploy", "helm", "values.yaml"))["service"]["port"]
        for item in documents("ScaledObject"):
            for trigger in item["spec"]["triggers"]:
                self.assertTrue(trigger["metadata"]["scalerAddress"].endswith(f".svc:{port}"))


if __name__ == "__main__":
    unittest.main()
