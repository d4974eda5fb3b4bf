"""The Dockerfile and the compose file: no engine is needed to see that they fit the program and each other."""

import os
import re
import unittest

import yaml

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")


def text(*path):
    with open(os.path.join(ROOT, *path), encoding="utf-8") as file:
        return file.read()


class Images(unittest.TestCase):
    def setUp(self):
        self.dockerfile = text("deploy", "Dockerfile")
        self.compose = yaml.safe_load(text("deploy", "compose.yaml"))
        self.version = re.search(r'^version = "(.*)"$', text("Cargo.toml"), re.MULTILINE).group(1)

    def test_the_image_has_all_that_the_build_reads(self):
        kept = re.findall(r"^!(.*)$", text("deploy", "Dockerfile.dockerignore"), re.MULTILINE)
        for path in kept:
            self.assertTrue(os.path.exists(os.path.join(ROOT, path)), path)
        manifest = text("Cargo.toml")
        needed = {"Cargo.toml", "Cargo.lock"}
        needed |= {path.split("/")[0] for path in re.findall(r'^(?:path|build|readme) = "(.*)"$', manifest, re.MULTILINE)}
        self.assertLessEqual(needed, {path.split("/")[0] for path in kept})
        # What the sources include at compile time lies in these folders as well.
        for folder, _, files in os.walk(os.path.join(ROOT, "src")):
            for name in files:
                if name == "tests.rs":
                    continue
                for included in re.findall(r'include_(?:str|bytes)!\(\s*"([^"]*)"', text(folder, name)):
                    path = os.path.relpath(os.path.normpath(os.path.join(folder, included)), os.path.normpath(ROOT))
                    self.assertTrue(any(path == item or path.startswith(item + "/") for item in kept), f"{name}: {included}")

    def test_the_image_runs_without_root(self):
        last = self.dockerfile[self.dockerfile.rindex("\nFROM ") :]
        self.assertRegex(last, r"(?m)^USER 65532:65532$")
        self.assertRegex(last, r"(?m)^ENTRYPOINT \[")
        chart = yaml.safe_load(text("deploy", "helm", "values.yaml"))
        self.assertEqual(chart["podSecurityContext"]["runAsUser"], 65532)

    def test_versions_agree(self):
        chart = yaml.safe_load(text("deploy", "helm", "Chart.yaml"))
        self.assertEqual(chart["appVersion"], self.version)
        self.assertIn(f"landline:{self.version}", self.dockerfile)
        self.assertEqual(self.compose["services"]["landline"]["image"], f"landline:{self.version}")

    def test_compose_services_fit_together(self):
        services = self.compose["services"]
        volumes = set(self.compose["volumes"])
        published = []
        for name, service in services.items():
            with self.subTest(service=name):
                for other in service.get("depends_on", {}):
                    self.assertIn(other, services)
                    self.assertIn("healthcheck", services[other])
                for volume in service.get("volumes", []):
                    self.assertIn(volume.split(":")[0], volumes)
                published += service.get("ports", [])
        self.assertEqual(len(published), len(set(published)))
        for port in published:
            self.assertTrue(port.startswith("127.0.0.1:"), port)
        self.assertNotEqual(
            services["node-a"]["environment"]["CONNECTORS_GCP_NODE_ID"],
            services["node-b"]["environment"]["CONNECTORS_GCP_NODE_ID"],
        )


if __name__ == "__main__":
    unittest.main()
