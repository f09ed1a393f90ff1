"""OpenAI's field ``prediction``: on its way to the requests of a body, and the counts on their way to the usage."""

import asyncio
import json

import pytest
import torch
from dspark_kernels import ASKED_ROWS
from settled_requests import LetterTokenizer, settled
from sglang_objects import batch
from stage_loop import lookup_of

from sglang_dspark.engine.batch import DSparkBatchResult
from sglang_dspark.engine.requests import ASKED
from sglang_dspark.features.prompt_lookup import ROUTE, Predictions, keep_counts
from sglang_dspark.features.prompt_lookup.keys import COUNTS
from sglang_dspark.step.decision import PLAIN, StepRecord

PREDICTION = {"type": "content", "content": "да"}


def served(body, answers, sent, path=ROUTE, asked=None, kind=b"application/json"):
    """Return what the application finds as ``speculation`` and as its body, and the ASGI messages of its answer.

    Args:
        answers: of the engine: entries of the counts by sample.
        sent: bodies that the application then sends.
    """
    found, messages = [], []

    async def engine(manager):
        for id_, entries in answers:
            yield {"meta_info": {"id": id_, COUNTS: entries, "other": 1}}

    async def application(scope, receive, send):
        found.extend([ASKED.get(), (await receive())["body"]])
        async for answer in keep_counts(engine, None):
            assert answer["meta_info"].keys() == {"id", "other"}
        headers = [(b"content-type", kind), (b"content-length", b"7"), (b"x", b"y")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for place, part in enumerate(sent):
            await send({"type": "http.response.body", "body": part, "more_body": place + 1 < len(sent)})

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    async def respond(message):
        messages.append(message)

    async def serve():
        before = ASKED.set(asked)
        await Predictions(application)(
            {"type": "http", "method": "POST", "path": path, "headers": []}, receive, respond
        )
        assert ASKED.get() == asked  # of the next request
        ASKED.reset(before)

    asyncio.run(serve())
    return found, messages


def body_of(**fields):
    return json.dumps({"model": "m", "messages": [], **fields}).encode()


@pytest.mark.parametrize("asked", [None, "{}", '{"max_verify": 3}'])
def test_the_field_becomes_a_key_of_speculation(asked):
    body = body_of(prediction=PREDICTION)
    for written in (body, body.replace(b"pred", b"\\u0070red"), body.decode().encode("utf-16")):
        [field, passed], _ = served(written, [], [b"{}"], asked=asked)
        assert passed == written
        assert json.loads(field) == json.loads(asked or "{}") | {"prediction": PREDICTION}


@pytest.mark.parametrize(
    ("body", "asked"),
    [
        (body_of(), None),
        (body_of(prediction=None), None),
        (body_of(messages="a prediction"), '{"max_verify": 3}'),
        (body_of(prediction=PREDICTION), '"x"'),
        (b"prediction, not JSON", None),
        (b"[" * 100_000 + b"prediction", None),
        (b'["prediction"]', None),
    ],
)
def test_other_bodies_are_left_alone(body, asked):
    answer = b'{"usage": {"completion_tokens": 1}}'
    [field, passed], messages = served(body, [], [answer], asked=asked)
    assert (field, passed) == (asked, body)
    assert messages[0]["headers"][1] == (b"content-length", b"7") and messages[1]["body"] == answer


def test_other_routes_are_left_alone():
    [field, _], _ = served(body_of(prediction=PREDICTION), [], [b"{}"], path="/v1/completions")
    assert field is None


def test_a_whole_answer_has_the_counts():
    """There are two samples, one of which came in two messages."""
    usage = {"usage": {"completion_tokens": 9, "completion_tokens_details": {"reasoning_tokens": 2}}, "text": "да"}
    text = json.dumps(usage, ensure_ascii=False).encode()
    answers = [("a", [[1, 0], [2, 5]]), ("b", [[0, 1]]), ("a", [[3, 6]]), ("c", None)]
    _, [start, whole] = served(body_of(prediction=PREDICTION), answers, [text[:9], text[9:]])
    found = json.loads(whole["body"])
    assert found["usage"].pop("completion_tokens_details") == {
        "reasoning_tokens": 2,
        "accepted_prediction_tokens": 3,
        "rejected_prediction_tokens": 7,
    }
    assert found == {"usage": {"completion_tokens": 9}, "text": "да"}
    assert dict(start["headers"]) == {
        b"content-type": b"application/json",
        b"x": b"y",
        b"content-length": str(len(whole["body"])).encode(),
    }


def test_an_error_stays_as_it_is():
    _, [_, whole] = served(body_of(prediction=PREDICTION), [], [b'{"error": "usage"}'])
    assert whole["body"] == b'{"error": "usage"}'


def test_the_usage_of_a_stream_has_the_counts():
    events = [b'data: {"choices": [1], "usage": null}', b'data: {"usage": {}, "choices": []}', b"data: [DONE]", b""]
    sent = [events[0] + b"\n\n", b"\n\n".join(events[1:])]
    _, [_, first, last] = served(body_of(prediction=PREDICTION), [("a", [[3, 6]])], sent, kind=b"text/event-stream")
    assert first["body"] == sent[0]
    event, *others = last["body"].split(b"\n\n")
    assert others == events[2:]
    details = json.loads(event.removeprefix(b"data: "))["usage"]["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 6}


def test_each_token_knows_what_was_owed_to_the_prediction_up_to_there():
    """Two output tokens were there before the prompt was encoded again; the second step has nothing predicted.

    The last token comes beside another prompt, and is on the host later than that prompt is launched.
    """
    reqs = [settled(None), settled({"prediction": PREDICTION}, LetterTokenizer())]
    for req in reqs:
        req.output_ids.extend([1, 2])
    part = lookup_of(7)
    part.prefill_done(batch(*reqs, decoding_reqs=None))
    assert reqs[1].customized_info == {COUNTS: [(0, 0)] * 3}  # of the token to come, too
    reqs[1].output_ids.append(3)
    for copied, verified, tokens in ((4, 3, [5, 6, 7]), (0, 2, [8, 9]), (3, 7, [9])):
        chains = torch.tensor([[0, 0, -1], [ASKED_ROWS + 1, copied, 4]])
        rounds = StepRecord(["a", "b"], PLAIN, [7, 7], torch.tensor([1, verified]), None, None, chains=chains)
        part.tokens_come(batch(*reqs), DSparkBatchResult(record=rounds), [[5], tokens])
        reqs[1].output_ids.extend(tokens)
    part.prefill_done(batch(*reqs, decoding_reqs=reqs))
    assert reqs[1].customized_info[COUNTS][-1] == (2, 4) and len(reqs[1].customized_info[COUNTS]) == 9
    part.step_done(reqs, rounds, [0, 1], [0, 0])
    assert reqs[0].customized_info is None
    assert reqs[1].customized_info == {
        COUNTS: [*[(0, 0)] * 3, (1, 1), (2, 1), (2, 1), (2, 1), (2, 1), (2, 4), (2, 4)],
    }
