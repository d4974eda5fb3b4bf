"""The console in a real browser: the server that cargo built, headless Chromium, pictures below target/console."""

import base64
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
import unittest
import urllib.request

from playwright.sync_api import sync_playwright

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
SERVER = os.environ.get("LANDLINE_BINARY", os.path.join(ROOT, "target", "debug", "landline"))
BROWSER = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
PICTURES = os.path.join(ROOT, "target", "console")
PASSWORD = "correct horse battery staple"
SECONDS = 60


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Console(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        os.makedirs(PICTURES, exist_ok=True)
        cls.folder = tempfile.TemporaryDirectory(prefix="landline-console-")
        password = os.path.join(cls.folder.name, "password")
        with open(password, "w", encoding="utf-8") as file:
            file.write(PASSWORD + "\n")
        cls.api, cls.url = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        settings = {
            "PORT": cls.api.rsplit(":", 1)[1],
            "ADMIN_ADDRESS": cls.url.removeprefix("http://"),
            "ADMIN_PASSWORD_FILE": password,
            "BROKER_URL": "memory:",
            "PRELOAD": "demo,orders:billing:shipping,dead:morgue,evil:victim",
        }
        environment = {f"CONNECTORS_GCP_{key}": value for key, value in settings.items()}
        log = open(os.path.join(PICTURES, "server.log"), "w", encoding="utf-8")
        cls.server = subprocess.Popen([SERVER], env={**os.environ, **environment}, stdout=log, stderr=log)
        log.close()
        until = time.monotonic() + SECONDS
        while True:
            try:
                urllib.request.urlopen(f"{cls.url}/readyz", timeout=5).close()
                break
            except OSError:
                if time.monotonic() > until or cls.server.poll() is not None:
                    raise
                time.sleep(0.05)
        cls.playwright = sync_playwright().start()
        cls.browser = cls.playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])

    @classmethod
    def tearDownClass(cls):
        cls.browser.close()
        cls.playwright.stop()
        cls.server.terminate()
        cls.server.wait(SECONDS)
        cls.folder.cleanup()

    def setUp(self):
        self.context = self.browser.new_context(viewport={"width": 1200, "height": 800})
        self.page = self.context.new_page()
        self.page.set_default_timeout(SECONDS * 1000)
        self.complaints = []
        # A breach of the content security policy is told on the browser's console.
        self.page.on("console", lambda said: self.complaints.append(said.text) if said.type == "error" else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: self.complaints.append(f"dialog: {dialog.message}") or dialog.dismiss())
        self.page.on("request", lambda request: self.assertTrue(request.url.startswith(self.url), request.url))

    def tearDown(self):
        self.context.close()
        self.assertEqual(self.complaints, [])

    def publish(self, topic, *messages):
        body = json.dumps({"messages": messages}).encode()
        request = urllib.request.Request(f"{self.api}/v1/projects/demo/topics/{topic}:publish", body)
        urllib.request.urlopen(request, timeout=SECONDS).close()

    def sign_in(self, path="/"):
        self.page.goto(self.url + path)
        self.page.get_by_label("Your name").fill("anna")
        self.page.get_by_label("Password").fill(PASSWORD)
        self.page.get_by_role("button", name="Sign in").click()
        self.page.wait_for_url(self.url + path)

    def picture(self, name):
        self.page.screenshot(path=os.path.join(PICTURES, f"{name}.png"))

    def test_an_operator_works_through_the_console(self):
        self.sign_in()
        self.page.get_by_text("serving", exact=True).wait_for()
        self.page.get_by_role("link", name="Topics", exact=True).click()
        self.page.get_by_role("link", name="orders").click()
        self.page.get_by_text("Publish a test message").click()
        self.page.get_by_label("Data").fill('{"order": 7, "text": "<b>hot</b>"}')
        self.page.get_by_label("Attributes").fill("colour=blue")
        self.page.get_by_role("button", name="Publish").click()
        self.page.get_by_text("Published message").wait_for()
        self.picture("topic")
        self.page.get_by_role("link", name="billing").click()
        self.picture("subscription")
        self.page.get_by_role("link", name="Look at messages").click()
        self.page.get_by_text('"text": "<b>hot</b>"').wait_for()
        self.picture("messages")
        self.page.goto(f"{self.url}/subscriptions/demo/billing")
        self.page.locator("summary", has_text="Purge").click()
        self.page.get_by_label("I am sure").last.check()
        self.page.get_by_role("button", name="Purge").click()
        self.page.get_by_text("counts as acknowledged.", exact=False).first.wait_for()
        self.page.get_by_role("link", name="Overview").click()
        self.page.get_by_text("Largest backlogs").wait_for()
        self.picture("overview")
        self.page.get_by_role("button", name="Sign out").click()
        self.page.wait_for_url(f"{self.url}/login")

    def test_dead_letters_are_moved_back(self):
        source = {
            "CloudPubSubDeadLetterSourceSubscription": "shipping",
            "CloudPubSubDeadLetterSourceSubscriptionProject": "demo",
        }
        self.publish("dead", *({"data": "ZGVhZA==", "attributes": source} for _ in range(30)))
        self.sign_in("/subscriptions/demo/morgue")
        self.page.get_by_text("Replay dead letters").click()
        self.page.get_by_role("button", name="Move messages").click()
        self.page.get_by_text("Moved 30 messages. 0 are left in the subscription.").wait_for()
        self.picture("replay")

    def test_numbers_and_searches_keep_up_without_a_new_page(self):
        self.sign_in("/subscriptions/demo/morgue")
        self.page.evaluate("window.same = true")
        self.publish("dead", {"data": "bmV3", "attributes": {"a": "b"}})
        self.page.get_by_text("known at the next look").wait_for(state="detached")
        self.page.locator("#live b", has_text="1").first.wait_for()
        self.assertTrue(self.page.evaluate("window.same"))
        self.page.goto(f"{self.url}/subscriptions")
        self.page.evaluate("window.same = true")
        self.page.get_by_label("Name begins with").press_sequentially("ship")
        self.page.get_by_role("link", name="billing").wait_for(state="detached")
        self.assertEqual(self.page.locator("#list tbody tr").count(), 1)
        self.assertTrue(self.page.evaluate("window.same"))

    def test_nothing_in_a_message_runs(self):
        evil = "<script>alert(1)</script><img src=x onerror=alert(2)><div hx-get=/topics hx-trigger=load>"
        data = base64.b64encode(evil.encode()).decode()
        self.publish("evil", {"data": data, "attributes": {"<svg onload=alert(3)>": '"><script>alert(4)</script>'}})
        self.sign_in("/subscriptions/demo/victim/messages")
        self.page.get_by_text("<script>alert(1)</script>").wait_for()
        self.picture("hostile")

    def test_pages_work_without_scripts(self):
        context = self.browser.new_context(java_script_enabled=False)
        self.page = context.new_page()
        self.sign_in("/subscriptions")
        self.page.get_by_label("Name begins with").fill("bill")
        self.page.get_by_role("button", name="Search").click()
        self.assertEqual(self.page.locator("#list tbody tr").count(), 1)
        self.page.get_by_role("link", name="billing").click()
        self.page.get_by_role("heading", name="Settings").wait_for()
        context.close()


if __name__ == "__main__":
    unittest.main()
