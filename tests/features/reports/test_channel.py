"""Questions to the scheduler: none hangs, fails or gets another one's answer, whatever callers and bodies do."""

import asyncio
import functools
import json

import numpy as np
import pytest
from fastapi import FastAPI
from sglang.srt.managers.communicator import FanOutCommunicator
from sglang.srt.managers.io_struct import GetInternalStateReqOutput
from starlette.testclient import TestClient

from sglang_dspark.engine import http
from sglang_dspark.engine.http import MAX_WAITING, Turns
from sglang_dspark.errors import BusyError, ConfigError
from sglang_dspark.features.reports import routes
from sglang_dspark.features.reports.routes import KEY, REPLICA, Channel


class Manager:
    """SGLang's end of the channel, with a scheduler that answers every question with itself, or several."""

    def __init__(self, answers=True, replicas=1):
        self.answers, self.asked, self.replicas = answers, [], replicas
        self.get_internal_state_communicator = FanOutCommunicator(self._send, fan_out=replicas)

    def auto_create_handle_loop(self):
        pass

    def _send(self, request):
        question = json.loads(request.rid)[KEY]
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
        state = {KEY: found, REPLICA: replica}
        self.get_internal_state_communicator.handle_recv(GetInternalStateReqOutput(internal_state=state))


@pytest.fixture(autouse=True)
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
def client(monkeypatch):
    manager = Manager()
    monkeypatch.setattr(routes, "tokenizer_manager", lambda: manager)
    monkeypatch.setattr(routes, "TURNS", Turns())
    app = FastAPI()
    routes.add(app, None)
    with TestClient(app, raise_server_exceptions=False) as client:
        client.manager = manager
        yield client


JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize("depth", [3, 480, 500, 900, 5000, 100_000])
def test_deep_policies_are_refused_and_nothing_hangs(client, depth):
    body = '{"policy": ' + "[" * depth + "]" * depth + "}"
    answer = client.post("/dspark/policy", content=body, headers=JSON)
    assert answer.status_code == 400
    assert "flat JSON object" in answer.json()["message"]
    assert client.get("/dspark/capabilities").status_code == 200
    assert [question["question"] for question in client.manager.asked] == ["capabilities"]


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_a_form_of_another_site_switches_nothing(client, kind):
    answer = client.post("/dspark/policy", content='{"policy": "off"}', headers={"Content-Type": kind} if kind else {})
    assert answer.status_code == 415
    assert "Content-Type: application/json" in answer.json()["message"]
    assert client.manager.asked == []
    json_too = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert client.post("/dspark/policy", content='{"policy": "off"}', headers=json_too).status_code == 200


def test_a_figure_that_is_no_number_is_null(client):
    client.manager.reply = lambda question, replica: client.manager.give(
        {"answer": {"shift": float("nan"), "steps": np.float64(3)}}
    )
    answer = client.get("/dspark/capabilities")
    assert (answer.status_code, answer.json()) == (200, {"shift": None, "steps": 3.0})


def test_no_answer_is_service_unavailable(monkeypatch):
    manager = Manager(answers=False)
    monkeypatch.setattr(routes, "tokenizer_manager", lambda: manager)
    monkeypatch.setattr(routes, "TURNS", Turns(0.05))
    app = FastAPI()
    routes.add(app, None)
    with TestClient(app) as client:
        for path in ("/dspark/stats", "/dspark/capabilities"):
            answer = client.get(path)
            assert answer.status_code == 503
            assert answer.json()["type"] == "ServiceUnavailableError"
