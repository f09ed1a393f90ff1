"""Thousands of odd requests through our part of the front end, without a server: none makes it fail."""

from collections import Counter, defaultdict

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from fuzzing.bodies import CHAT, COMPLETIONS, GENERATE, LARGE, Bodies
from starlette.middleware import Middleware
from starlette.testclient import TestClient

from sglang_dspark.engine import fired
from sglang_dspark.engine.front_end import routes
from sglang_dspark.engine.front_end.http import SpeculationMiddleware
from sglang_dspark.speculation import Speculation

REQUESTS = 1500


@pytest.fixture
def client(monkeypatch):
    """An application that parses bodies as SGLang's does, and answers with what it got."""
    app = FastAPI()

    async def parsed(request: Request):
        try:
            document = await request.json()
        except (ValueError, RecursionError):
            return JSONResponse({"message": "not JSON"}, status_code=400)
        assert not isinstance(document, dict) or "speculation" not in document
        return JSONResponse({})

    for path in (GENERATE, COMPLETIONS, CHAT):
        app.add_api_route(path, parsed, methods=["POST"])

    class Echo:
        def __init__(self, manager):
            pass

        async def ask(self, question, fields):
            return {"question": question, "fields": {key: repr(value) for key, value in fields.items()}}

    monkeypatch.setattr(fired, "_awaited", defaultdict(dict))  # of other tests, which install hooks
    monkeypatch.setattr(routes, "Channel", Echo)
    monkeypatch.setattr(routes, "_stats", lambda answer, history_s: JSONResponse(answer))
    monkeypatch.setattr(routes.dashboard, "page", lambda needs_key: ("page", "policy"))
    monkeypatch.setattr(routes, "_server_args", lambda: type("Args", (), {"api_key": None}))
    routes.add(app, None)
    app.user_middleware.append(Middleware(SpeculationMiddleware))
    with TestClient(app, follow_redirects=False) as client:
        yield client


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_no_body_makes_our_part_of_the_front_end_fail(client, seed):
    bodies, statuses = Bodies(seed), Counter()
    for _ in range(REQUESTS // 2):
        sent = bodies.next()
        answer = client.request(sent.method, sent.path, content=sent.body, headers=sent.headers)
        statuses[answer.status_code] += 1
        if answer.status_code == 400 and sent.path in (GENERATE, COMPLETIONS, CHAT):
            assert answer.json()["message"].startswith(("speculation", "the body holds half", "not JSON"))
    assert set(statuses) <= {200, 307, 400, 404, 405, 415, 422}
    assert statuses[200] > 100
    assert statuses[400] > 100


def test_no_value_of_the_field_makes_its_check_fail():
    refusals = []
    for value in LARGE:
        for given in (value, {"candidates": value, "preset": "classification"}, {"max_verify": value}, {"": value}):
            try:
                Speculation.parse(given)
            except ValueError as error:
                refusals.append(str(error))
    assert len(refusals) > len(LARGE)
    assert all(refusal.startswith("speculation") for refusal in refusals)
