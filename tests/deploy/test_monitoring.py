"""Rules and dashboard against the table of metrics, by the eyes of Prometheus' own tool."""

import json
import os
import re
import subprocess
import tempfile
import unittest

import yaml

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
FILES = os.path.join(ROOT, "deploy", "helm", "files")
RULES = os.path.join(FILES, "rules.yaml")


def table():
    """The metrics by name: type, labels and Google's name."""
    with open(os.path.join(ROOT, "deploy", "metrics.md"), encoding="utf-8") as file:
        text = file.read()
    full = re.findall(r"^\| `(\S+)` \| (\w+) \| ([^|`]*) \| (?:`([^`]*)`)? ?\| .* \|$", text, re.MULTILINE)
    short = re.findall(r"^\| `(landline_broker_\S+)` \| (\w+) \| [^|]* \|$", text, re.MULTILINE)
    metrics = {name: (kind, {label for label in labels.split(", ") if label}, google) for name, kind, labels, google in full}
    metrics.update({name: (kind, set(), "") for name, kind in short})
    return metrics


def series(metrics):
    names = set()
    for name, (kind, _, _) in metrics.items():
        names |= {name + suffix for suffix in ("_bucket", "_sum", "_count")} if kind == "histogram" else {name}
    return names


def used(expression):
    """Names of series in an expression."""
    return set(re.findall(r"\b(?:landline|process)_[a-z0-9_]+", expression))


def rules():
    with open(RULES, encoding="utf-8") as file:
        return [rule for group in yaml.safe_load(file)["groups"] for rule in group["rules"]]


def dashboard():
    with open(os.path.join(FILES, "dashboard.json"), encoding="utf-8") as file:
        return json.load(file)


def promtool(*arguments):
    return subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)


class Monitoring(unittest.TestCase):
    def test_the_table_is_read(self):
        metrics = table()
        self.assertGreater(len(metrics), 35)
        self.assertEqual(metrics["landline_ready"], ("gauge", set(), ""))
        self.assertEqual(metrics["landline_broker_free_bytes"][0], "gauge")

    def test_prometheus_takes_the_rules(self):
        checked = promtool("check", "rules", RULES)
        self.assertEqual(checked.returncode, 0, checked.stdout + checked.stderr)

    def test_every_metric_with_a_google_name_is_recorded_under_it(self):
        recorded = {rule["record"]: rule for rule in rules() if "record" in rule}
        expected = {
            "pubsub_googleapis_com:" + google.replace("/", "_"): name
            for name, (kind, _, google) in table().items()
            if google and kind != "histogram"
        }
        self.assertEqual(set(recorded), set(expected))
        for record, name in expected.items():
            self.assertEqual(used(recorded[record]["expr"]), {name})
            resource = "pubsub_topic" if ":topic_" in record else "pubsub_subscription"
            self.assertEqual(recorded[record]["labels"], {"monitored_resource": resource})

    def test_rules_and_panels_use_metrics_that_exist(self):
        known = series(table())
        expressions = [rule["expr"] for rule in rules()]
        targets = [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", [])]
        queries = [item["query"]["query"] for item in dashboard()["templating"]["list"] if item["type"] == "query"]
        self.assertGreater(len(targets), 25)
        for expression in expressions + targets + queries:
            with self.subTest(expression=expression):
                self.assertTrue(used(expression))
                self.assertLessEqual(used(expression), known)

    def test_prometheus_takes_the_panels_queries(self):
        found = []
        for panel in dashboard()["panels"]:
            for target in panel.get("targets", []):
                text = target["expr"].replace("$__rate_interval", "5m").replace("$project", ".*").replace("$subscription", ".*")
                self.assertNotIn("$", text)
                found.append({"record": f"q{len(found)}", "expr": text})
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            yaml.safe_dump({"groups": [{"name": "panels", "rules": found}]}, file)
            file.flush()
            checked = promtool("check", "rules", file.name)
        self.assertEqual(checked.returncode, 0, checked.stdout + checked.stderr)

    def test_panels_have_ids_and_places_of_their_own(self):
        panels = dashboard()["panels"]
        self.assertEqual(len({panel["id"] for panel in panels}), len(panels))
        taken = set()
        for panel in panels:
            place = panel["gridPos"]
            cells = {
                (x, y)
                for x in range(place["x"], place["x"] + place["w"])
                for y in range(place["y"], place["y"] + place["h"])
            }
            self.assertLessEqual(place["x"] + place["w"], 24)
            self.assertFalse(cells & taken, panel["title"])
            taken |= cells

    def test_rules_do_what_they_say(self):
        labels = 'project_id="p",subscription_id="s"'
        case = {
            "rule_files": [os.path.abspath(RULES)],
            "evaluation_interval": "1m",
            "tests": [
                {
                    "interval": "1m",
                    "input_series": [
                        {"series": f'landline_subscription_num_undelivered_messages{{{labels},instance="a"}}', "values": "7x30"},
                        {"series": f'landline_subscription_num_undelivered_messages{{{labels},instance="b"}}', "values": "7x30"},
                        {"series": f'landline_subscription_oldest_unacked_message_age_seconds{{{labels}}}', "values": "0+60x30"},
                        {"series": f'landline_subscription_ack_messages_total{{{labels},instance="a"}}', "values": "0+60x30"},
                        {"series": f'landline_subscription_ack_messages_total{{{labels},instance="b"}}', "values": "0+120x30"},
                        {"series": 'landline_ready{instance="a"}', "values": "1x10 0x20"},
                        {"series": 'landline_ready{instance="b"}', "values": "1x30"},
                    ],
                    "promql_expr_test": [
                        {
                            "expr": "pubsub_googleapis_com:subscription_num_undelivered_messages",
                            "eval_time": "10m",
                            "exp_samples": [
                                {
                                    "labels": "pubsub_googleapis_com:subscription_num_undelivered_messages"
                                    f'{{{labels},monitored_resource="pubsub_subscription"}}',
                                    "value": 7,
                                }
                            ],
                        },
                        {
                            "expr": "sum by (subscription_id) (rate(pubsub_googleapis_com:subscription_ack_message_count[5m]))",
                            "eval_time": "20m",
                            "exp_samples": [{"labels": '{subscription_id="s"}', "value": 3}],
                        },
                    ],
                    "alert_rule_test": [
                        {"eval_time": "9m", "alertname": "LandlineNotReady", "exp_alerts": []},
                        {
                            "eval_time": "14m",
                            "alertname": "LandlineNotReady",
                            "exp_alerts": [
                                {
                                    "exp_labels": {"severity": "critical", "instance": "a"},
                                    "exp_annotations": {
                                        "summary": "a does not serve",
                                        "description": "The broker is away or the node is draining. The log of the node says which.",
                                    },
                                }
                            ],
                        },
                        {"eval_time": "12m", "alertname": "LandlineBacklogOld", "exp_alerts": []},
                        {
                            "eval_time": "17m",
                            "alertname": "LandlineBacklogOld",
                            "exp_alerts": [
                                {
                                    "exp_labels": {"severity": "warning", "project_id": "p", "subscription_id": "s"},
                                    "exp_annotations": {
                                        "summary": "Messages of s wait for more than ten minutes",
                                        "description": "Its consumers are too few, too slow or gone: see open_streaming_pulls "
                                        "and sent_messages.",
                                    },
                                }
                            ],
                        },
                    ],
                }
            ],
        }
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            yaml.safe_dump(case, file)
            file.flush()
            tested = promtool("test", "rules", file.name)
        self.assertEqual(tested.returncode, 0, tested.stdout + tested.stderr)


if __name__ == "__main__":
    unittest.main()
