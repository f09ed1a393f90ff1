"""The live page in a real browser, against real servers."""

from __future__ import annotations

import json
import math
from urllib.parse import urlsplit

import pytest
from chromium import chromium
from golden_server import greedy, output_ids, policy


class Page:
    """One tab of a browser."""

    def __init__(self, driver):
        self.driver = driver

    def open(self, server, *, width=1280, scheme="light"):
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        self.driver.execute_cdp_cmd("Emulation.setFocusEmulationEnabled", {"enabled": True})
        self.driver.get(server.url + "/dspark")

    def text(self, element):
        return self.driver.find_element("id", element).text

    def run(self, script):
        return self.driver.execute_script("return " + script)

    def wait(self, condition, what):
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.driver, 60, 0.2).until(lambda driver: condition(), what)

    def wait_for_state(self, state):
        self.wait(lambda: self.run("document.body.dataset.state") == state, f"the page never became {state}")

    def errors(self):
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def hosts(self):
        """Return the hosts of all requests since the last call."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
        # The browser's own first tab is made of chrome:// and chrome-untrusted:// pages.
        return {urlsplit(url).netloc for url in sent if urlsplit(url).scheme in ("http", "https", "ws", "wss")}


@pytest.fixture(scope="session")  # tests of other servers run in between
def browser():
    with chromium() as driver:
        yield driver


@pytest.fixture
def page(browser):
    made = Page(browser)
    yield made
    browser.execute_script("sessionStorage.clear()")
    browser.get("about:blank")
    made.errors()
    made.hosts()


def traffic(server):
    output_ids(server, [greedy([5 + i, 9, 20 + i, 7], 48) for i in range(12)], 6)


def number(text):
    return float(text.removesuffix(" %")) if text.strip("0123456789. %") == "" else math.nan


def test_tiles_and_charts_show_the_statistics(dspark, page):
    """The tiles show what has happened since the page was opened, or in the last minute."""
    page.open(dspark)
    page.wait_for_state("live")
    before = dspark.get_json("/dspark/stats")
    traffic(dspark)

    def agrees():
        stats = dspark.get_json("/dspark/stats")
        names = ("committed_tokens", "rounds", "verified_tokens", "accepted_tokens", "steps")
        committed, rounds, verified, accepted, steps = (stats[name] - before[name] for name in names)
        shown = {  # with the tile's last digit
            "tile-accept": (committed / rounds, 0.01),
            "tile-verify": (verified / rounds, 0.01),
            "tile-load": (rounds / steps, 0.01),
            "tile-waste": (100 - 100 * accepted / verified, 1),
        }
        return all(
            abs(number(page.text(tile)) - value) < 0.51 * digit for tile, (value, digit) in shown.items()
        ) and f"{stats['committed_tokens']:,}" in page.text("facts-server")

    page.wait(agrees, "the page and /dspark/stats never agreed")
    assert page.run("[...document.querySelectorAll('.chart')].filter(c => !c.querySelector('svg')).length") == 0
    bars = page.run("document.querySelectorAll('#chart-survival .column').length")
    assert bars == sum(value is not None for value in dspark.get_json("/dspark/stats")["survival"])
    assert "policy auto" in page.text("chips")
    assert not page.driver.find_element("id", "replicas").is_displayed()
    assert "vanilla, rank" in page.text("facts-drafter")
    assert f"plugin: {dspark.get_json('/dspark/capabilities')['reason']}" in page.text("facts-server")
    facts = page.run("[...document.querySelectorAll('dd')].map(text => text.textContent)")
    assert all(facts) and not any("undefined" in fact for fact in facts)
    assert page.errors() == []
    assert page.hosts() == {urlsplit(dspark.url).netloc}


def test_empty_panels_say_why(dspark, page):
    with policy(dspark, "off"):
        page.open(dspark)
        page.wait_for_state("live")
        words = page.run("[0, 5].map((steps) => (Object.assign(stats, {steps}), whyUnverified()))")
        assert words == ["no decode step yet", "nothing was verified: the policy off never speculates"]
        chart = "timeChart($('chart-step'), {points: [], now: 9, lines: []})"
        # In one go: the page draws again every second.
        assert page.run(f"({chart}, $('chart-step').textContent)") == "no decode step since this page was opened"


@pytest.mark.parametrize(("width", "scheme"), [(360, "light"), (1280, "dark")])
def test_the_page_fits_and_follows_the_scheme(dspark, page, width, scheme):
    traffic(dspark)
    page.open(dspark, width=width, scheme=scheme)
    page.wait_for_state("live")
    assert page.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    red = int(page.run("getComputedStyle(document.body).backgroundColor").removeprefix("rgb(").split(",")[0])
    assert (red < 64) == (scheme == "dark")


def test_the_page_of_a_silent_server(dspark, page):
    page.open(dspark)
    page.wait_for_state("live")
    offline = {"offline": True, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    page.driver.execute_cdp_cmd("Network.enable", {})
    page.driver.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
    try:
        page.wait_for_state("lost")
        assert "does not answer" in page.text("notice")
        page.run("window.dispatchEvent(new Event('resize'))")
        assert page.text("chips") == "no answer"
    finally:
        page.driver.execute_cdp_cmd("Network.emulateNetworkConditions", {**offline, "offline": False})
    page.wait_for_state("live")
    assert not page.driver.find_element("id", "notice").is_displayed()


def test_the_page_asks_for_the_key(guarded, page):
    page.open(guarded)
    page.wait_for_state("locked")
    assert page.errors() == []
    page.driver.find_element("id", "key").send_keys("wrong\n")
    page.wait(lambda: "refused" in page.text("key-form"), "a wrong key was not refused")
    page.driver.find_element("id", "key").send_keys("user-key\n")
    page.wait_for_state("live")
    page.driver.refresh()
    page.wait_for_state("live")


@pytest.mark.thorough
def test_the_page_shows_all_replicas_or_one(replicas, page):
    traffic(replicas)
    page.open(replicas)
    page.wait_for_state("live")
    stats = replicas.get_json("/dspark/stats")
    for button, shown in zip(("all replicas", "replica 0", "replica 1"), [stats, *stats["replicas"]], strict=True):
        page.run(f"[...$('replicas').children].find(b => b.textContent === '{button}').click()")
        committed = f"{shown['committed_tokens']:,}"
        page.wait(lambda committed=committed: committed in page.text("facts-server"), f"{button} is not shown")
        assert "policy auto" in page.text("chips")
        pressed = page.run("[...$('replicas').children].map(b => b.getAttribute('aria-pressed'))")
        assert pressed.count("true") == 1
    assert len({replica["committed_tokens"] for replica in stats["replicas"]} | {stats["committed_tokens"]}) > 1
    assert page.errors() == []
