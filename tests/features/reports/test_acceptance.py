"""``metrics.speculative_decoding`` of an answer: vLLM's form, in a stream's last event; none is held back before it."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from sglang_dspark.features.reports import acceptance
from sglang_dspark.features.reports.acceptance import NOTED, add_acceptance, stream_with_acceptance

ROUNDS = {"rounds": 5, "drafted_tokens": 35, "verified_tokens": 8, "accepted_tokens": 6, "accept_length": 2.2}
META_INFO = {"dspark": ROUNDS, "spec_correct_drafts_histogram": [2, 1, 1, 1]}
EXPECTED = {
    "mean_acceptance_length": 2.2,
    "draft_acceptance_rate": 0.75,
    "acceptance_histogram": [2, 1, 1, 1],
    "num_spec_steps": 5,
    "num_accepted_draft_tokens": 6,
    "num_draft_tokens": 8,
    "num_spec_tokens": 7,
}
DONE = "data: [DONE]\n\n"


class Response(BaseModel):
    id: str
    usage: dict | None = None


@pytest.fixture(autouse=True)
def _eight_tokens_per_step(monkeypatch):
    monkeypatch.setattr(acceptance, "tokens_per_step", lambda: 8)


def event(**chunk):
    return f"data: {json.dumps(chunk)}\n\n"


def streamed(events, *, counted_before):
    """Return what comes of a stream whose engine has given its whole answer before the event of this index."""
    received, seen = [], []

    async def original(serving, adapted, *args):
        for index, text in enumerate(events):
            if index == counted_before:
                setattr(adapted, NOTED, META_INFO)
            yield text
            seen.append(len(received))

    async def read():
        async for text in stream_with_acceptance(original, None, SimpleNamespace(), None):
            received.append(text)  # noqa: PERF401 - one by one: the stream looks at what has arrived

    asyncio.run(read())
    return received, seen


def test_the_form_is_that_of_vllm():
    response = add_acceptance(Response(id="a"), None, None, [{"meta_info": META_INFO}], 0)
    assert isinstance(response, Response)
    assert json.loads(response.model_dump_json()) == {
        "id": "a",
        "usage": None,
        "metrics": {"speculative_decoding": EXPECTED},
    }
    assert sum(EXPECTED["acceptance_histogram"]) == EXPECTED["num_spec_steps"]


@pytest.mark.parametrize(
    ("response", "answers"),
    [
        (Response(id="a"), [{"meta_info": META_INFO}] * 2),
        (Response(id="a"), [{"meta_info": {}}]),
        (JSONResponse({}), [{"meta_info": META_INFO}]),
    ],
    ids=["two samples", "no decode step", "not SGLang's form"],
)
def test_other_responses_stay_as_they_are(response, answers):
    assert add_acceptance(response, None, None, answers, 0) is None


def test_a_plain_request_verifies_nothing():
    counts = {**ROUNDS, "verified_tokens": 0, "accepted_tokens": 0, "accept_length": 1.0}
    meta_info = {"dspark": counts, "spec_correct_drafts_histogram": [5]}
    found = acceptance.acceptance(meta_info)
    assert (found["draft_acceptance_rate"], found["num_draft_tokens"]) == (0.0, 0)


@pytest.mark.parametrize("counted_before", [1, 2])
def test_the_last_event_of_a_stream_has_it_and_no_event_waits(counted_before):
    parts = [event(choices=[{"delta": letter}]) for letter in "abé"]
    usage = event(choices=[], usage={"completion_tokens": 3})
    received, seen = streamed([*parts, usage, DONE], counted_before=counted_before)
    assert received[:3] == parts
    assert json.loads(received[3].removeprefix("data: ")) == {
        "choices": [],
        "usage": {"completion_tokens": 3},
        "metrics": {"speculative_decoding": EXPECTED},
    }
    assert received[4] == DONE
    # Every event of an answer that goes on is received before the next one is made.
    assert seen[:counted_before] == list(range(1, counted_before + 1))


def test_errors_and_answers_without_a_step_stay_as_they_are():
    error = event(error={"message": "no"})
    assert streamed([error, DONE], counted_before=0)[0] == [error, DONE]
    parts = [event(choices=[1]), event(choices=[2])]
    assert streamed(parts, counted_before=9)[0] == parts
    assert streamed(parts, counted_before=0)[0] == parts  # ended by an exception, without [DONE]
