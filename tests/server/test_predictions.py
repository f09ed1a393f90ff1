"""OpenAI's field ``prediction``: a text that the client expects, over HTTP and by OpenAI's client."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from golden_server import call, policy

from sglang_dspark.tools.launch import LaunchedServer

pytestmark = pytest.mark.slow

PROMPT, LENGTH = "the dog видит 猫, 고양이, قطة 🐈", 48


def asked(server: LaunchedServer, stream: bool, **fields: Any) -> tuple[str, Any]:
    """The text of an answer, and its usage."""
    body = {"model": "m", "max_tokens": LENGTH, "temperature": 0, "messages": [{"role": "user", "content": PROMPT}]}
    body["extra_body"] = {"ignore_eos": True}
    if stream:
        fields["stream_options"] = {"include_usage": True}
    http = httpx.Client(trust_env=False)
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="unused", http_client=http, max_retries=0)
    answer = client.chat.completions.create(**body, **fields, stream=stream)
    if not stream:
        return answer.choices[0].message.content, answer.usage
    chunks = list(answer)
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices), chunks[-1].usage


def content(text: Any) -> dict[str, Any]:
    return {"type": "content", "content": text}


@pytest.fixture
def expected(plain_letters: LaunchedServer) -> str:
    return asked(plain_letters, False)[0]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_predicted_text_is_accepted_and_counted(letters, expected, stream):
    """It comes as a text, in parts, and in the middle of another one."""
    half = len(expected) // 2
    parts = [{"type": "text", "text": text} for text in (expected[:half], expected[half:])]
    for predicted in (expected, parts, "красный 猫: " + expected + " 🐈"):
        with policy(letters, "static"):  # ``auto`` may find plain steps faster
            text, usage = asked(letters, stream, prediction=content(predicted))
        details = usage.completion_tokens_details
        assert text == expected
        assert LENGTH * 0.6 < details.accepted_prediction_tokens < usage.completion_tokens == LENGTH
        assert details.rejected_prediction_tokens >= 0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_where_the_text_leaves_its_prediction_drafts_are_rejected(letters, expected, stream):
    with policy(letters, "static"):
        text, usage = asked(letters, stream, prediction=content(expected[:24] + "☂" * 24))
    details = usage.completion_tokens_details
    assert text == expected
    assert details.accepted_prediction_tokens > 0 and details.rejected_prediction_tokens > 0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    "predicted",
    ["", [], "совсем другое: 猫 고양이 قطة", "\u200b", "a" * 32768],
    ids=["nothing", "no part", "other", "blank", "long"],
)
def test_whatever_is_predicted_the_text_is_the_same(letters, expected, stream, predicted):
    text, usage = asked(letters, stream, prediction=content(predicted))
    details = usage.completion_tokens_details
    assert text == expected
    assert details.accepted_prediction_tokens < LENGTH / 2 and details.rejected_prediction_tokens >= 0
    if not predicted:
        assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0)


def test_an_answer_without_a_prediction_has_no_counts(letters, expected):
    text, usage = asked(letters, False)
    assert text == expected
    assert usage.completion_tokens_details is None


def test_several_samples_are_counted_together(letters, expected):
    body = {"model": "m", "messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "ignore_eos": True}
    body |= {"max_tokens": LENGTH, "n": 3, "prediction": content(expected)}
    with policy(letters, "static"):
        found = json.loads(call(letters, "/v1/chat/completions", body=body)[1])
    assert [choice["message"]["content"] for choice in found["choices"]] == [expected] * 3
    details = found["usage"]["completion_tokens_details"]
    assert 2 * LENGTH < details["accepted_prediction_tokens"] < 3 * LENGTH


@pytest.mark.parametrize(
    ("predicted", "named"),
    [
        ("a", "must be"),
        ([], "must be"),
        (content(7), "must be"),
        (content([{"type": "image_url", "image_url": {"url": "x"}}]), "must be"),
        (content("ab\ud83d"), "no low surrogate"),  # by SGLang's own parser
        (content("д" * 100_000), "has 200000 bytes; pass at most 131072"),
        (content("a" * 32769), "has 32769 tokens; pass at most 32768"),
    ],
    ids=["text", "list", "number", "picture", "half", "bytes", "tokens"],
)
def test_a_bad_prediction_is_refused_by_name(letters, predicted, named):
    """The name is that of the field which the client sent."""
    body = {"model": "m", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4}
    for stream in (False, True):
        status, text = call(letters, "/v1/chat/completions", body=body | {"prediction": predicted, "stream": stream})
        assert status == 400
        assert named in text and "speculation" not in text and ("prediction " in text or "surrogate" in named)


def test_tokens_that_the_target_does_not_have_are_left_out(letters):
    body = {"model": "m", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": LENGTH, "temperature": 0}
    plain = letters.post_json("/v1/chat/completions", body)["choices"][0]["message"]["content"]
    predicted = content("<beyond>" + plain + "<beyond>")
    with policy(letters, "static"):
        found = letters.post_json("/v1/chat/completions", body | {"prediction": predicted})
    assert found["choices"][0]["message"]["content"] == plain
    assert found["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0
