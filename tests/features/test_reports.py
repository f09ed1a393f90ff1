"""Tests of reports: accepted drafts in SGLang's log, questions to the scheduler, and the page.

No question hangs or gets another one's answer, and replicas are summed as one server.
"""

import asyncio
import base64
import functools
import hashlib
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
from fastapi import FastAPI
from sglang.srt.managers.communicator import FanOutCommunicator
from sglang.srt.managers.io_struct import GetInternalStateReqOutput
from sglang.srt.runtime_context import get_context
from sglang_objects import partly
from starlette.testclient import TestClient

from sglang_dspark.engine import http
from sglang_dspark.engine.http import MAX_WAITING, Turns
from sglang_dspark.errors import BusyError, ConfigError
from sglang_dspark.features.reports import Reports, report_verified, routes
from sglang_dspark.features.reports.counters import Counters, Versions
from sglang_dspark.features.reports.routes import (
    ANSWER_KEY,
    REPLICA,
    Channel,
    in_common,
    page_document,
    stats_document,
    with_each,
)
from sglang_dspark.scheduling.online_calibration import PredictedSurvival
from sglang_dspark.step.decision import TimedStep
from sglang_dspark.worker.worker import DSparkWorker

BLOCK, KEPT = 7, 4 + 3


class Reporter(SimpleNamespace):
    """Divides by whole blocks, in every second call, and starts again, as SGLang's does."""

    def report(self, *, is_due, num_generated_tokens):
        assert num_generated_tokens == KEPT
        if is_due:
            assert self.num_generated_tokens == self.steps * KEPT
            self.said.append(self.spec_num_correct_drafts / (self.spec_num_forward_ct * BLOCK))
            self.spec_num_correct_drafts = self.spec_num_forward_ct = self.spec_num_cap_tokens = 0


def add(reporter, verified, accepted):
    reporter.spec_num_correct_drafts += accepted
    reporter.spec_num_forward_ct += 1
    reporter.spec_num_cap_tokens += verified + 1
    reporter.num_generated_tokens += accepted + 1
    reporter.steps += 1


@pytest.fixture
def said():
    """Return what a reporter says of steps [(verified, accepted), ...], reported after each; the last two are due."""
    requests = [SimpleNamespace(output_ids=[7] * 9, finished_len=end) for end in (None, 8, 4)]
    part = partly(Reports, _taking=[(req, 5) for req in requests])  # the last one's end lies before the step
    scheduler = SimpleNamespace(draft_worker=partly(DSparkWorker, parts=[part]))

    def said(first, second):
        counts = "steps num_generated_tokens spec_num_correct_drafts spec_num_forward_ct spec_num_cap_tokens"
        reporter = Reporter(said=[], scheduler=scheduler, **dict.fromkeys(counts.split(), 0))
        for steps in (first, second):
            for number, step in enumerate(steps, start=1):
                add(reporter, *step)
                generated = step[1] + 1
                report_verified(Reporter.report, reporter, is_due=number == len(steps), num_generated_tokens=generated)
        return reporter.said

    with get_context().override_server_args(speculative_num_draft_tokens=BLOCK + 1):
        yield said


def test_accepted_drafts_are_divided_by_the_verified_ones(said):
    assert said([(2, 1), (5, 2), (1, 1)], [(7, 7), (7, 0)]) == pytest.approx([4 / 8, 7 / 14])


def test_nothing_is_accepted_of_nothing(said):
    assert said([(0, 0), (0, 0)], [(0, 0), (3, 2)]) == pytest.approx([0.0, 2 / 3])


class Manager:
    """SGLang's end of the channel, with a scheduler that answers every question with itself, or several."""

    def __init__(self, answers=True, replicas=1):
        self.answers, self.asked, self.replicas = answers, [], replicas
        self.get_internal_state_communicator = FanOutCommunicator(self._send, fan_out=replicas)

    def auto_create_handle_loop(self):
        pass

    def _send(self, request):
        question = dict(zip(("question", "fields"), json.loads(request.rid), strict=True))
        self.asked.append(question)
        if self.answers:
            for replica in reversed(range(self.replicas)):
                asyncio.get_running_loop().call_later(0.001 * (self.replicas - replica), self.reply, question, replica)

    async def was_asked(self, times):
        async with asyncio.timeout(60):
            while len(self.asked) < times:
                await asyncio.sleep(0)

    def reply(self, question, replica=0):
        refused = question["fields"].get("policy") == f"not for {replica}"
        answer = question | question["fields"] | {"of": replica}
        self.give({"refusal": "no such policy"} if refused else {"answer": answer}, replica)

    def give(self, found, replica=0):
        state = {ANSWER_KEY: found, REPLICA: replica}
        self.get_internal_state_communicator.handle_recv(GetInternalStateReqOutput(internal_state=state))


@pytest.fixture
def no_pause(monkeypatch):
    monkeypatch.setattr(http, "PAUSE_S", 0.0)


def in_a_loop(test):
    """Make a test of a coroutine."""

    @functools.wraps(test)
    def run():
        asyncio.run(test())

    return run


@in_a_loop
async def test_everybody_gets_the_answer_to_his_own_question():
    manager = Manager()
    asked = Channel(lambda: manager, Turns())
    policies = [asked.ask("policy", {"policy": f"p{i}"}) for i in range(MAX_WAITING - 1)]
    reads = [asked.ask("stats", {}) for _ in range(100)]
    answers = [answer for [answer] in await asyncio.gather(*policies, *reads)]
    assert [answer["fields"].get("policy") for answer in answers[: len(policies)]] == [
        f"p{i}" for i in range(MAX_WAITING - 1)
    ]
    assert {answer["question"] for answer in answers[len(policies) :]} == {"stats"}
    # Those who only read, and had to wait, share an answer that was made after they asked.
    assert [question["question"] for question in manager.asked].count("stats") == 1
    await asked.ask("stats", {})
    assert [question["question"] for question in manager.asked].count("stats") == 2


@in_a_loop
async def test_a_reader_never_gets_what_was_asked_before_him():
    manager = Manager(answers=False)
    asked = Channel(lambda: manager, Turns(60))
    first = asyncio.create_task(asked.ask("stats", {}))
    await manager.was_asked(1)
    second = asyncio.create_task(asked.ask("stats", {}))
    await asyncio.sleep(0.01)
    assert len(manager.asked) == 1
    manager.reply({"fields": {}, "place": 1})
    assert (await first)[0]["place"] == 1
    await manager.was_asked(2)
    manager.reply({"fields": {}, "place": 2})
    assert (await second)[0]["place"] == 2


@in_a_loop
async def test_what_cannot_be_sent_holds_up_nobody():
    manager = Manager()
    asked = Channel(lambda: manager, Turns())
    good = [asked.ask("policy", {"policy": f"p{i}"}) for i in range(3)]
    bad = asked.ask("policy", {"policy": lambda: None})  # is no JSON
    answers = await asyncio.wait_for(asyncio.gather(good[0], bad, good[1], good[2], return_exceptions=True), 60)
    assert [isinstance(answer, Exception) for answer in answers] == [False, True, False, False]


@in_a_loop
async def test_a_silent_scheduler_is_reported_and_its_late_answer_goes_to_nobody_else():
    manager = Manager(answers=False)
    asked = Channel(lambda: manager, Turns(0.05))
    for _ in range(3):
        with pytest.raises(BusyError, match=r"not answered for 0\.05 s"):
            await asked.ask("stats", {})
    # One question was sent; all others waited for it, and share the next one.
    assert len(manager.asked) == 1
    manager.answers, asked._turns.limit_s = True, 60
    manager.reply({"fields": {}, "question": "late"})
    for question in ("capabilities", "stats"):
        assert [answer["question"] for answer in await asked.ask(question, {})] == [question]


@in_a_loop
async def test_every_replica_answers_in_its_place():
    asked = Channel(lambda: Manager(replicas=3), Turns())
    assert [answer["of"] for answer in await asked.ask("stats", {})] == [0, 1, 2]
    with pytest.raises(ConfigError, match="no such policy"):
        await asked.ask("policy", {"policy": "not for 1"})


@in_a_loop
async def test_no_more_wait_than_can_be_answered():
    manager = Manager(answers=False)
    asked = Channel(lambda: manager, Turns(0.05))
    answers = await asyncio.gather(
        *(asked.ask("policy", {"policy": f"p{i}"}) for i in range(2 * MAX_WAITING)), return_exceptions=True
    )
    assert {type(answer) for answer in answers} == {BusyError}
    assert sum("calls already wait" in str(answer) for answer in answers) == MAX_WAITING


@pytest.fixture
def client(request, monkeypatch):
    """Of a server whose scheduler answers, unless the test says otherwise."""
    answers = getattr(request, "param", True)
    manager = Manager(answers=answers)
    monkeypatch.setattr(routes, "tokenizer_manager", lambda: manager)
    monkeypatch.setattr(routes, "TURNS", Turns() if answers else Turns(0.05))
    app = FastAPI()
    routes.add_routes(app, None)
    with TestClient(app, raise_server_exceptions=False) as client:
        client.manager = manager
        yield client


JSON = {"Content-Type": "application/json"}


@pytest.mark.usefixtures("no_pause")
@pytest.mark.parametrize("depth", [3, 480, 500, 900, 5000, 100_000])
def test_deep_policies_are_refused_and_nothing_hangs(client, depth):
    body = '{"policy": ' + "[" * depth + "]" * depth + "}"
    answer = client.post("/dspark/policy", content=body, headers=JSON)
    assert answer.status_code == 400
    assert "flat JSON object" in answer.json()["message"]
    assert client.get("/dspark/capabilities").status_code == 200
    assert [question["question"] for question in client.manager.asked] == ["capabilities"]


@pytest.mark.usefixtures("no_pause")
@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_a_form_of_another_site_switches_nothing(client, kind):
    answer = client.post("/dspark/policy", content='{"policy": "off"}', headers={"Content-Type": kind} if kind else {})
    assert answer.status_code == 415
    assert "Content-Type: application/json" in answer.json()["message"]
    assert client.manager.asked == []
    json_too = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert client.post("/dspark/policy", content='{"policy": "off"}', headers=json_too).status_code == 200


@pytest.mark.usefixtures("no_pause")
def test_a_figure_that_is_no_number_is_null(client):
    client.manager.reply = lambda question, replica: client.manager.give(
        {"answer": {"shift": float("nan"), "steps": np.float64(3)}}
    )
    answer = client.get("/dspark/capabilities")
    assert (answer.status_code, answer.json()) == (200, {"shift": None, "steps": 3.0})


@pytest.mark.usefixtures("no_pause")
@pytest.mark.parametrize("client", [False], indirect=True)
def test_no_answer_is_service_unavailable(client):
    for path in ("/dspark/stats", "/dspark/capabilities"):
        answer = client.get(path)
        assert answer.status_code == 503
        assert answer.json()["type"] == "ServiceUnavailableError"


GAMMA = 3


class Replica:
    """Counts steps, and answers as a scheduler does."""

    def __init__(self, **state):
        self.predicted = PredictedSurvival(GAMMA)
        self.counters, self.state, self.uptime_s = Counters(GAMMA, self.predicted), state, 4.0

    def step(self, verified, accepted, policy="auto"):
        self.counters.record([GAMMA] * len(verified), verified, accepted, policy=policy)
        self.counters.record_time(TimedStep(len(verified), 10.0 * len(verified), 9.0))
        self.predicted.observe(np.full((len(verified), GAMMA), 0.5), np.array(verified), np.array(accepted))
        return self

    def answer(self):
        versions = Versions(("default", ""))
        if "bad" in self.state:
            versions.first_drafts |= {"verified": 80, "accepted": 2, "promises": 80, "promised": 64.0}
        return {
            "state": {"policy": "auto", **self.state},
            "uptime_s": self.uptime_s,
            "versions": versions.counts,
            "sums": self.counters.sums().lists(),
            "counted": {
                "slos": {"met": 1, "missed": 2},
                "failed_advice": {"presets": 2},
                "steps_by_policy": dict(self.counters.steps_by_policy),
            },
        }


BUSY, IDLE = ([3, 2], [1, 2]), ([1], [0])


def test_figures_of_two_replicas_are_those_of_one_that_counts_both():
    one, other, both = Replica(), Replica(), Replica()
    for replica, step in ((one, BUSY), (one, IDLE), (other, BUSY)):
        replica.step(*step)
        both.step(*step)
    other.uptime_s = 3.0
    expected = stats_document([both.answer()])
    found = with_each(stats_document, [one.answer(), other.answer()])
    assert found.pop("replicas") == [stats_document([replica.answer()]) for replica in (one, other)]
    assert found.pop("failed_advice") == {"presets": 4}
    assert found.pop("slos") == {"met": 2, "missed": 4}
    assert found == {name: value for name, value in expected.items() if name not in ("failed_advice", "slos")}


def test_a_state_is_told_if_all_have_it():
    found = with_each(stats_document, [Replica(schedule={"probes": n}).answer() for n in (1, 2)])
    assert found["policy"] == "auto" and "schedule" not in found
    assert [replica["schedule"] for replica in found["replicas"]] == [{"probes": 1}, {"probes": 2}]
    assert in_common([{"a": 1, "most": 8}, {"a": 1, "most": 9}]) == {"a": 1}


def test_a_drafter_is_judged_by_the_drafts_of_all():
    one = stats_document([Replica(bad=True).answer()])["drafter_fit"]
    both = stats_document([Replica(bad=True).answer(), Replica(bad=True).answer()])["drafter_fit"]
    assert (one["first_drafts"], both["first_drafts"]) == (80, 160)
    assert one["promised"] == both["promised"] == pytest.approx(0.8)
    assert both["verdict"] == "misfit"


DOCUMENT, POLICY = page_document(needs_key=False)


def test_nothing_comes_from_elsewhere():
    assert set(re.findall(r"https?://[^\s'\"]+", DOCUMENT)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<(link|img|script|iframe)\b[^>]*(src|href)=[\"'](?!data:)", DOCUMENT)


@pytest.mark.parametrize("tag", ["style", "script"])
def test_the_policy_allows_what_the_page_contains(tag):
    content = re.search(rf"<{tag}>(.*?)</{tag}>", DOCUMENT, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    assert f"{tag}-src 'sha256-{digest}'" in POLICY


def test_the_script_finds_every_element_it_names():
    ids = set(re.findall(r'\bid="([^"]+)"', DOCUMENT))
    script = re.search(r"<script>(.*?)</script>", DOCUMENT, re.DOTALL)[1]
    named = set(re.findall(r'\$\("([^"]+)"\)|"((?:tile|chart|facts)-[a-z-]+)"', script))
    named = {name for names in named for name in names if name}
    assert len(named) > 20
    assert named - ids == set()


def test_nothing_is_left_to_fill_in():
    assert re.findall(r"\{\{\w+\}\}", DOCUMENT) == []
    assert 'data-needs-key="yes"' in page_document(needs_key=True)[0]
