"""The Helm chart, rendered by Helm's own engine and held against the schemas of several Kubernetes versions."""

import glob
import json
import os
import re
import unittest

import helm_python as helm
import kubernetes_validate
import yaml
from kubernetes_validate import utils

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
CHART = os.path.join(ROOT, "deploy", "helm")
# From the chart's kubeVersion to the newest whose schema is at hand.
VERSIONS = utils.all_versions()
# Settings that the chart decides itself.
OWN_SETTINGS = {"PORT", "BIND", "NODE_ID", "ADMIN_ADDRESS", "DRAIN_DELAY_SECONDS", "DRAIN_SECONDS", "BROKER_URL"}
# Kinds that an operator brings; there are no schemas for them here.
FOREIGN_KINDS = {"ServiceMonitor", "PrometheusRule"}
# Fields that came later than the oldest version; values that ask for them need a newer one.
NEW_FIELDS = {"embedded-delete": "1.27"}


def cases():
    """Values by name: the defaults, the files beside the chart, and some of the tests' own."""
    values = {"defaults": {}, "embedded-delete": {"persistence": {"whenDeleted": "Delete"}}}
    for path in glob.glob(os.path.join(CHART, "ci", "*.yaml")):
        with open(path, encoding="utf-8") as file:
            values[os.path.basename(path).removesuffix(".yaml")] = yaml.safe_load(file)
    return values


def render(values, name="release"):
    """All objects of a release."""
    with helm.Chart.load(CHART) as chart:
        chart.validate_schema(values)
        texts = chart.render(values, name=name, namespace="somewhere")
    objects = []
    for path, text in texts.items():
        if path.endswith(".yaml"):
            objects += [item for item in yaml.safe_load_all(text) if item]
    return objects


def one(objects, kind, suffix=""):
    """The only object of a kind, or the one whose name ends like this."""
    found = [item for item in objects if item["kind"] == kind]
    if len(found) > 1:
        plain = min(found, key=lambda item: len(item["metadata"]["name"]))
        found = [item for item in found if item["metadata"]["name"].endswith(suffix)] if suffix else [plain]
    assert len(found) == 1, f"{kind}: {[item['metadata']['name'] for item in found]}"
    return found[0]


def kinds(objects):
    return sorted(item["kind"] for item in objects)


def version(text):
    return tuple(int(part) for part in text.split(".")[:2])


class Chart(unittest.TestCase):
    def pod(self, values):
        objects = render(values)
        kind = "Deployment" if values.get("mode") == "redis" else "StatefulSet"
        return one(objects, kind)["spec"]["template"]

    def container(self, values):
        return self.pod(values)["spec"]["containers"][0]

    def settings(self, values):
        """What the container's environment says."""
        data = dict(one(render(values), "ConfigMap")["data"])
        for item in self.container(values)["env"]:
            data[item["name"]] = item.get("value", item.get("valueFrom"))
        return {key.removeprefix("CONNECTORS_GCP_"): value for key, value in data.items()}

    def test_lint_finds_nothing(self):
        for name, values in cases().items():
            with self.subTest(values=name):
                report = helm.lint(CHART, values, strict=True)
                bad = [m for m in report["messages"] if m["severity"] >= 2]
                self.assertEqual((bad, report["errors"] or []), ([], []))

    def test_every_object_is_valid_in_every_version(self):
        self.assertGreaterEqual(len(VERSIONS), 10)
        checked = 0
        for name, values in cases().items():
            for item in render(values):
                if item["kind"] in FOREIGN_KINDS:
                    continue
                for release in VERSIONS:
                    if version(release) < version(NEW_FIELDS.get(name, "1.0")):
                        continue
                    with self.subTest(values=name, kind=item["kind"], version=release):
                        kubernetes_validate.validate(item, release, strict=True)
                        checked += 1
        self.assertGreater(checked, 200)

    def test_the_validator_refuses_a_wrong_object(self):
        item = one(render({}), "StatefulSet")
        item["spec"]["template"]["spec"]["containers"][0]["readinessProb"] = {}
        with self.assertRaises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(item, VERSIONS[-1], strict=True)

    def test_embedded_mode_is_one_pod_with_a_volume(self):
        objects = render({})
        self.assertEqual(kinds(objects), ["ConfigMap", "Service", "Service", "ServiceAccount", "StatefulSet"])
        workload = one(objects, "StatefulSet")
        self.assertEqual(workload["spec"]["replicas"], 1)
        self.assertEqual(workload["spec"]["serviceName"], one(objects, "Service", "-pods")["metadata"]["name"])
        claim = workload["spec"]["volumeClaimTemplates"][0]
        mount = workload["spec"]["template"]["spec"]["containers"][0]["volumeMounts"][0]
        self.assertEqual((claim["metadata"]["name"], mount["mountPath"]), ("data", "/data"))
        self.assertEqual(self.settings({})["BROKER_URL"], "embedded:/data")

    def test_redis_mode_is_a_deployment_without_volumes(self):
        objects = render(cases()["redis-small"])
        self.assertEqual(
            kinds(objects), ["ConfigMap", "Deployment", "PodDisruptionBudget", "Service", "Service", "ServiceAccount"]
        )
        workload = one(objects, "Deployment")
        self.assertEqual(workload["spec"]["replicas"], 2)
        self.assertEqual(workload["spec"]["strategy"]["rollingUpdate"], {"maxSurge": 1, "maxUnavailable": 0})
        self.assertEqual(self.settings(cases()["redis-small"])["BROKER_URL"], "redis://redis:6379/0")

    def test_autoscaling_owns_the_number_of_pods(self):
        objects = render(cases()["redis-full"])
        self.assertNotIn("replicas", one(objects, "Deployment")["spec"])
        target = one(objects, "HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]
        self.assertEqual((target["kind"], target["name"]), ("Deployment", one(objects, "Deployment")["metadata"]["name"]))

    def test_selectors_find_the_pods(self):
        for name, values in cases().items():
            with self.subTest(values=name):
                objects = render(values)
                labels = self.pod(values)["metadata"]["labels"]
                for item in objects:
                    spec = item.get("spec", {})
                    selector = spec.get("selector") or spec.get("podSelector")
                    # A ServiceMonitor selects Services, which another test looks at.
                    if selector and item["kind"] != "ServiceMonitor":
                        selector = selector.get("matchLabels", selector)
                        self.assertLessEqual(selector.items(), labels.items(), item["kind"])

    def test_pods_run_without_privileges(self):
        for name, values in cases().items():
            with self.subTest(values=name):
                pod = self.pod(values)["spec"]
                self.assertFalse(pod["automountServiceAccountToken"])
                self.assertTrue(pod["securityContext"]["runAsNonRoot"])
                self.assertEqual(pod["securityContext"]["seccompProfile"], {"type": "RuntimeDefault"})
                container = pod["containers"][0]["securityContext"]
                self.assertFalse(container["allowPrivilegeEscalation"])
                self.assertTrue(container["readOnlyRootFilesystem"])
                self.assertEqual(container["capabilities"], {"drop": ["ALL"]})

    def test_probes_ask_for_health_where_it_matters(self):
        container = self.container({})
        port = {item["name"]: item["containerPort"] for item in container["ports"]}["pubsub"]
        self.assertEqual(container["readinessProbe"]["grpc"]["port"], port)
        for probe in ("startupProbe", "livenessProbe"):
            self.assertEqual(container[probe]["httpGet"], {"path": "/", "port": "pubsub"})

    def test_probes_speak_tls_where_the_server_does(self):
        own = {"settings": {"AUTH": "off", "TLS_CERT_FILE": "/x/tls.crt", "TLS_KEY_FILE": "/x/tls.key"}}
        for values in ({"tls": {"secretName": "tls"}}, {"tls": {"secretName": "tls", "clientAuth": "optional"}}, own):
            with self.subTest(values=values):
                container = self.container(values)
                self.assertEqual(container["readinessProbe"]["exec"]["command"][1], "healthcheck")
                for probe in ("startupProbe", "livenessProbe"):
                    self.assertEqual(container[probe]["httpGet"], {"path": "/", "port": "pubsub", "scheme": "HTTPS"})
        with open(os.path.join(ROOT, "deploy", "Dockerfile"), encoding="utf-8") as file:
            program = self.container(own)["readinessProbe"]["exec"]["command"][0]
            self.assertIn(f'ENTRYPOINT ["{program}"]', file.read())
        # The kubelet has no certificate to show.
        required = {"settings": {**own["settings"], "TLS_CLIENT_AUTH": "required"}}
        for values in ({"tls": {"secretName": "tls", "clientAuth": "required"}}, required):
            with self.subTest(values=values):
                container = self.container(values)
                self.assertEqual(container["readinessProbe"]["httpGet"], {"path": "/readyz", "port": "metrics"})
                for probe in ("startupProbe", "livenessProbe"):
                    self.assertEqual(container[probe]["httpGet"], {"path": "/livez", "port": "metrics"})

    def test_certificates_are_where_the_settings_say(self):
        def mounted(values, path):
            """The Secret behind a file in the container."""
            pod = self.pod(values)["spec"]
            mounts = [m for m in pod["containers"][0]["volumeMounts"] if os.path.dirname(path) == m["mountPath"]]
            self.assertEqual(len(mounts), 1, path)
            volume = {item["name"]: item["secret"] for item in pod["volumes"] if "secret" in item}[mounts[0]["name"]]
            items = volume.get("items")
            self.assertTrue(items is None or os.path.basename(path) in {item["path"] for item in items})
            return volume["secretName"]

        full, small = cases()["redis-full"], cases()["embedded-tls"]
        settings = self.settings(full)
        self.assertEqual(mounted(full, settings["TLS_CERT_FILE"]), "landline-tls")
        self.assertEqual(mounted(full, settings["TLS_KEY_FILE"]), "landline-tls")
        self.assertEqual(mounted(full, settings["TLS_CLIENT_CA_FILE"]), "clients")
        self.assertEqual(mounted(full, settings["OTLP_CA_FILE"]), "otel")
        self.assertEqual(settings["TLS_CLIENT_AUTH"], "optional")
        self.assertEqual(mounted(small, self.settings(small)["TLS_CLIENT_CA_FILE"]), "landline-tls")
        for item in render(full):
            if item["kind"] == "Service":
                self.assertEqual(item["spec"]["ports"][0]["appProtocol"], "https")

    def test_telemetry_goes_where_the_values_say(self):
        settings = self.settings(cases()["redis-full"])
        self.assertEqual(settings["OTLP_ENDPOINT"], "https://otel.monitoring:4318")
        self.assertEqual((settings["OTLP_PROTOCOL"], settings["OTLP_TRACES"]), ("http", "0.25"))
        self.assertEqual(settings["OTLP_METRICS_SECONDS"], "15")
        self.assertEqual(
            settings["OTLP_RESOURCE_ATTRIBUTES"], "deployment.environment.name=prod,k8s.namespace.name=somewhere"
        )
        self.assertEqual(settings["OTLP_HEADERS"], {"secretKeyRef": {"name": "otel", "key": "headers"}})
        own = self.settings({"otlp": {"endpoint": "http://o:1", "resourceAttributes": {"k8s.namespace.name": "mine"}}})
        self.assertEqual(own["OTLP_RESOURCE_ATTRIBUTES"], "k8s.namespace.name=mine")
        self.assertEqual(own["OTLP_TRACES"], "off")
        self.assertFalse([key for key in self.settings({}) if key.startswith("OTLP_")])

    def test_a_pod_gets_the_time_to_drain(self):
        values = {"drain": {"delaySeconds": 10, "seconds": 100, "marginSeconds": 35}}
        settings = self.settings(values)
        self.assertEqual((settings["DRAIN_DELAY_SECONDS"], settings["DRAIN_SECONDS"]), ("10", "100"))
        # The broker may take another 30 seconds to close.
        self.assertGreaterEqual(self.pod(values)["spec"]["terminationGracePeriodSeconds"], 10 + 100 + 30)
        self.assertGreaterEqual(self.pod({})["spec"]["terminationGracePeriodSeconds"], 25 + 30)

    def test_the_service_leads_to_the_port_of_the_server(self):
        for item in render({"service": {"port": 80}}):
            if item["kind"] == "Service":
                self.assertEqual(item["spec"]["ports"][0]["port"], 80)
                self.assertEqual(item["spec"]["ports"][0]["targetPort"], "pubsub")
        self.assertEqual(self.settings({})["PORT"], "8085")
        self.assertEqual(self.settings({})["BIND"], "0.0.0.0")
        self.assertEqual(self.settings({"bind": "[::]"})["BIND"], "[::]")

    def test_settings_reach_the_server_as_they_were_written(self):
        values = {"settings": {"MAX_MESSAGE_BYTES": 10485760, "ENABLE_REFLECTION": False, "LOG": "info"}}
        settings = self.settings(values)
        self.assertEqual(settings["MAX_MESSAGE_BYTES"], "10485760")
        self.assertEqual(settings["ENABLE_REFLECTION"], "false")
        self.assertEqual(settings["LOG"], "info")

    def test_changed_settings_roll_the_pods(self):
        def checksum(values):
            return self.pod(values)["metadata"]["annotations"]["checksum/settings"]

        self.assertEqual(checksum({}), checksum({}))
        self.assertNotEqual(checksum({}), checksum({"settings": {"LOG": "debug"}}))

    def test_secrets_are_named_and_never_written(self):
        settings = self.settings(cases()["redis-full"])
        self.assertEqual(settings["BROKER_URL"], {"secretKeyRef": {"name": "redis-address", "key": "url"}})
        self.assertEqual(settings["ADVERTISED_ENDPOINT"], {"secretKeyRef": {"name": "landline", "key": "endpoint"}})
        self.assertNotIn("CONNECTORS_GCP_BROKER_URL", one(render(cases()["redis-full"]), "ConfigMap")["data"])

    def test_each_pod_is_a_node_of_its_own(self):
        self.assertEqual(self.settings({})["NODE_ID"], {"fieldRef": {"fieldPath": "metadata.name"}})

    def test_the_network_policy_lets_through_what_the_server_needs(self):
        spec = one(render(cases()["redis-full"]), "NetworkPolicy")["spec"]
        ports = {port["port"] for rule in spec["egress"] for port in rule.get("ports", [])}
        self.assertEqual(ports, {53, 6379, 26379, 443, 4318})
        self.assertEqual(spec["ingress"][0]["ports"], [{"port": "pubsub", "protocol": "TCP"}])
        keda = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "keda"}}}
        self.assertEqual(spec["ingress"][1], {"from": [keda], "ports": [{"port": "pubsub", "protocol": "TCP"}]})
        self.assertEqual(spec["ingress"][2]["ports"], [{"port": "metrics", "protocol": "TCP"}])
        self.assertEqual(spec["ingress"][2]["from"], cases()["redis-full"]["metrics"]["from"])
        embedded = one(render(cases()["embedded-full"]), "NetworkPolicy")["spec"]
        self.assertEqual(len(embedded["ingress"]), 1)
        self.assertEqual({port["port"] for rule in embedded["egress"] for port in rule["ports"]}, {53})
        self.assertEqual(embedded["ingress"][0]["from"], [{"podSelector": {}}])

    def test_metrics_are_scraped_where_they_are_served(self):
        objects = render(cases()["redis-full"])
        monitor = one(objects, "ServiceMonitor")["spec"]
        service = one(objects, "Service", "-pods")
        self.assertLessEqual(monitor["selector"]["matchLabels"].items(), service["metadata"]["labels"].items())
        port = {item["name"]: item for item in service["spec"]["ports"]}[monitor["endpoints"][0]["port"]]
        ports = {item["name"]: item["containerPort"] for item in self.container(cases()["redis-full"])["ports"]}
        self.assertEqual(ports[port["targetPort"]], 9090)
        self.assertEqual(self.settings(cases()["redis-full"])["ADMIN_ADDRESS"], "0.0.0.0:9090")
        self.assertEqual(self.settings(cases()["embedded-full"])["ADMIN_ADDRESS"], "")
        other = [item for item in objects if item["kind"] == "Service" and item is not service]
        self.assertEqual([item["name"] for item in other[0]["spec"]["ports"]], ["pubsub"])

    def test_rules_and_dashboard_are_shipped_as_they_are(self):
        objects = render(cases()["redis-full"])
        with open(os.path.join(CHART, "files", "rules.yaml"), encoding="utf-8") as file:
            self.assertEqual(one(objects, "PrometheusRule")["spec"], yaml.safe_load(file))
        with open(os.path.join(CHART, "files", "dashboard.json"), encoding="utf-8") as file:
            shipped = one(objects, "ConfigMap", "-dashboard")["data"]["landline.json"]
            self.assertEqual(json.loads(shipped), json.load(file))

    def test_preloaded_resources_reach_the_server(self):
        values = cases()["embedded-full"]
        objects = render(values)
        config = one(objects, "ConfigMap", "-preload")
        self.assertEqual(json.loads(config["data"]["preload.json"]), values["preload"])
        pod = self.pod(values)["spec"]
        volume = {item["name"]: item for item in pod["volumes"]}["preload"]
        self.assertEqual(volume["configMap"]["name"], config["metadata"]["name"])
        mount = {item["name"]: item for item in pod["containers"][0]["volumeMounts"]}["preload"]
        self.assertEqual(self.settings(values)["PRELOAD_FILE"], mount["mountPath"] + "/preload.json")
        self.assertNotIn("PRELOAD_FILE", self.settings({}))

    def test_long_names_stay_legal(self):
        for item in render({"podDisruptionBudget": {"enabled": True}}, name="r" * 53):
            self.assertLessEqual(len(item["metadata"]["name"]), 58)
            self.assertRegex(item["metadata"]["name"], r"^[a-z]([-a-z0-9]*[a-z0-9])?$")

    def test_mistakes_are_refused_with_a_reason(self):
        redis = {"mode": "redis", "redis": {"url": "redis://redis"}}
        for values, reason in [
            ({"mode": "redis"}, "redis.url"),
            ({"mode": "kafka"}, "mode"),
            ({"mode": "redis", "redis": {"url": "redis://r", "urlSecret": {"name": "s"}}}, "not both"),
            ({"mode": "redis", "redis": {"url": "redis://:word@redis:6379"}}, "password"),
            ({"mode": "redis", "redis": {"url": "http://redis"}}, "url"),
            ({"autoscaling": {"enabled": True}}, "autoscaling needs mode redis"),
            ({**redis, "autoscaling": {"enabled": True, "minReplicas": 9}}, "minReplicas"),
            ({"settings": {"no_such": 1}}, "no_such"),
            ({"settings": {"PORT": 1}}, "PORT"),
            ({"settings": {"LOG": "info"}, "secretSettings": {"LOG": {"name": "a", "key": "b"}}}, "LOG is in settings"),
            ({"secretSettings": {"LOG": {"name": "a"}}}, "key"),
            ({"replica": 3}, "replica"),
            ({"metrics": {"port": 8085}}, "8085 is the port of the API"),
            ({"metrics": {"enabled": False, "serviceMonitor": {"enabled": True}}}, "needs metrics.enabled"),
            ({"image": {"digest": "sha256:12"}}, "digest"),
            ({"preload": {"topics": [{"name": "orders"}]}}, "preload"),
            ({"preload": {"topics": []}, "settings": {"PRELOAD_FILE": "/x"}}, "set one of them"),
            ({"persistence": {"size": "much"}}, "size"),
            ({"tls": {"clientAuth": "required"}}, "tls.clientAuth needs tls.secretName"),
            ({"tls": {"secretName": "s", "clientAuth": "required"}, "metrics": {"enabled": False}}, "needs metrics.enabled"),
            ({"tls": {"secretName": "s"}, "settings": {"TLS_CERT_FILE": "/x"}}, "settings.TLS_CERT_FILE: set one"),
            ({"otlp": {"endpoint": "http://o:1"}, "settings": {"OTLP_TRACES": 1}}, "settings.OTLP_TRACES: set one"),
            ({"otlp": {"endpoint": "otel:4317"}}, "endpoint"),
            ({"otlp": {"traces": 2}}, "traces"),
        ]:
            with self.subTest(values=values):
                with self.assertRaisesRegex(helm.HelmError, re.escape(reason)):
                    render(values)

    def test_the_schema_knows_every_value(self):
        with open(os.path.join(CHART, "values.schema.json"), encoding="utf-8") as file:
            schema = json.load(file)
        with open(os.path.join(CHART, "values.yaml"), encoding="utf-8") as file:
            values = yaml.safe_load(file)
        self.assertEqual(set(values) | {"global"}, set(schema["properties"]))

    def test_every_setting_can_be_set_but_for_those_the_chart_decides(self):
        # The README's table is held against the program's own list by another test.
        with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as file:
            keys = set(re.findall(r"^\| ([A-Z_]+) \| .*\| .*\| .*\|$", file.read(), re.MULTILINE))
        self.assertLess(OWN_SETTINGS, keys)
        self.settings({"settings": dict.fromkeys(keys - OWN_SETTINGS, "x")})
        for key in OWN_SETTINGS:
            with self.subTest(key=key), self.assertRaises(helm.HelmError):
                render({"settings": {key: "x"}})

    def test_the_password_of_the_console_is_a_file_of_a_secret(self):
        values = cases()["redis-full"]
        settings = self.settings(values)
        self.assertEqual(settings["ADMIN_PASSWORD_FILE"], "/etc/landline-console/operators")
        self.assertEqual(settings["ADMIN_HOSTS"], "console.example,landline.somewhere.svc")
        volume = next(item for item in self.pod(values)["spec"]["volumes"] if item["name"] == "console")
        self.assertEqual(volume["secret"]["secretName"], "landline-console")
        self.assertEqual(volume["secret"]["items"], [{"key": "operators", "path": "operators"}])
        self.assertIn("/etc/landline-console", [item["mountPath"] for item in self.container(values)["volumeMounts"]])
        self.assertNotIn("ADMIN_PASSWORD_FILE", self.settings({}))
        secret = {"passwordSecret": {"name": "s"}}
        for wrong in (
            {"console": secret, "metrics": {"enabled": False}},
            {"console": secret, "settings": {"AUTH": "off", "ADMIN_PASSWORD_FILE": "/x"}},
            {"console": {"hosts": ["a"]}, "settings": {"AUTH": "off", "ADMIN_HOSTS": "b"}},
            {"console": {"password": "x"}},
        ):
            with self.subTest(wrong=wrong), self.assertRaises(helm.HelmError):
                render(wrong)


if __name__ == "__main__":
    unittest.main()
