"""Clients and benchmarks: official packages on four routes, streams, tools, several turns, counts of drafts.

Every text is that of the plain server.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import anthropic
import httpx
import httpx2
import openai
import pytest
from golden_server import counting, greedy
from spoken_target import TOOL_CALL

from sglang_dspark.tools.launch import LaunchedServer

pytestmark = pytest.mark.slow

PROMPT = "the dog видит 猫, 고양이, قطة 🐈"
PERSON = {
    "type": "object",
    "properties": {
        "имя": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "maximum": 99},
        "答": {"enum": ["да", "дом", "猫", "猯"]},
    },
    "required": ["имя", "age", "答"],
    "additionalProperties": False,
}
NO_ARGUMENTS = {"type": "object", "properties": {}}
TOOLS = [{"type": "function", "function": {"name": "get_time", "parameters": NO_ARGUMENTS}}]


def openai_client(server: LaunchedServer) -> openai.OpenAI:
    client = httpx.Client(trust_env=False)
    return openai.OpenAI(base_url=server.url + "/v1", api_key="unused", http_client=client, max_retries=0)


def anthropic_client(server: LaunchedServer) -> anthropic.Anthropic:
    client = httpx2.Client(trust_env=False)
    return anthropic.Anthropic(base_url=server.url, api_key="unused", http_client=client, max_retries=0)


def chat(server: LaunchedServer, stream: bool, **extra: Any) -> str:
    messages = [{"role": "user", "content": PROMPT}]
    how = {"model": "m", "max_tokens": 24, "temperature": 0, "extra_body": extra, "stream": stream}
    answer = openai_client(server).chat.completions.create(messages=messages, **how)
    if not stream:
        return answer.choices[0].message.content
    return "".join(choice.delta.content or "" for chunk in answer for choice in chunk.choices)


def completion(server: LaunchedServer, stream: bool, **extra: Any) -> str:
    how = {"model": "m", "max_tokens": 24, "temperature": 0, "extra_body": extra, "stream": stream}
    answer = openai_client(server).completions.create(prompt=PROMPT, **how)
    return "".join(choice.text for chunk in (answer if stream else [answer]) for choice in chunk.choices)


def response(server: LaunchedServer, stream: bool, **extra: Any) -> str:
    client = openai_client(server)
    [model] = client.models.list()
    how = {"model": model.id, "max_output_tokens": 24, "temperature": 0, "extra_body": extra, "stream": stream}
    answer = client.responses.create(input=PROMPT, **how)
    if not stream:
        return answer.output_text
    return "".join(event.delta for event in answer if event.type == "response.output_text.delta")


def message(server: LaunchedServer, stream: bool, **extra: Any) -> str:
    how = {"model": "m", "max_tokens": 24, "extra_body": {"temperature": 0, **extra}}
    messages = [{"role": "user", "content": PROMPT}]
    if not stream:
        blocks = anthropic_client(server).messages.create(messages=messages, **how).content
        return "".join(block.text for block in blocks if block.type == "text")
    with anthropic_client(server).messages.stream(messages=messages, **how) as answer:
        return "".join(answer.text_stream)


ROUTES: dict[str, Callable[..., str]] = {
    "/v1/chat/completions": chat,
    "/v1/completions": completion,
    "/v1/responses": response,
    "/v1/messages": message,
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("route", ROUTES)
def test_texts_are_those_of_the_plain_server_and_the_field_speculation_arrives(letters, plain_letters, route, stream):
    expected = ROUTES[route](plain_letters, stream)
    assert expected
    assert ROUTES[route](letters, stream) == expected
    with counting(letters) as counts:
        assert ROUTES[route](letters, stream, speculation={"enabled": False}) == expected
    assert counts["rounds"] > 0
    assert counts["verified_tokens"] == 0


@pytest.mark.parametrize("route", ROUTES)
def test_a_bad_field_is_refused_on_every_route(letters, route):
    with pytest.raises((openai.APIStatusError, anthropic.APIStatusError), match=r"speculation\.max_verify") as refusal:
        ROUTES[route](letters, False, speculation={"max_verify": -1})
    assert refusal.value.status_code == 400


@pytest.mark.parametrize(("route", "stream"), [("/v1/chat/completions", True), ("/v1/responses", False)])
def test_structured_output(letters, plain_letters, route, stream):
    named = {"type": "json_schema", "name": "person", "schema": PERSON}
    asked: dict[str, Any] = {"text": {"format": named}, "max_output_tokens": 80}
    if route == "/v1/chat/completions":
        asked = {"response_format": {"type": "json_schema", "json_schema": named}, "max_tokens": 80}
    found = ROUTES[route](letters, stream, **asked)
    assert json.loads(found).keys() == PERSON["properties"].keys()
    assert found == ROUTES[route](plain_letters, stream, **asked)


Turn = tuple[str, list[tuple[str, str]]]
"""Text, and names and arguments of the tools that were called."""


def openai_agent(server: LaunchedServer, turns: int) -> list[Turn]:
    """Call tools and answer their calls; without one, go on asking."""
    messages: list[Any] = [{"role": "user", "content": PROMPT}]
    transcript: list[Turn] = []
    for turn in range(turns):
        # After these tokens the target writes a call.
        extra = {"separate_reasoning": False} | ({"input_ids": TOOL_CALL} if turn == 0 else {})
        asked = {"model": "m", "temperature": 0, "max_tokens": 7 if turn == 0 else 24, "tools": TOOLS}
        answer = openai_client(server).chat.completions.create(messages=messages, extra_body=extra, **asked)
        said = answer.choices[0].message
        calls = said.tool_calls or []
        transcript.append((said.content or "", [(call.function.name, call.function.arguments) for call in calls]))
        kept = {"tool_calls": [call.model_dump() for call in calls]} if calls else {}
        messages.append({"role": "assistant", "content": said.content or "", **kept})
        messages += _answers(calls) or [{"role": "user", "content": f"and the lamp {turn}"}]
    return transcript


def _answers(calls: Sequence[Any]) -> list[dict[str, Any]]:
    return [{"role": "tool", "tool_call_id": call.id, "content": "the red lamp"} for call in calls]


def anthropic_agent(server: LaunchedServer, turns: int) -> list[Turn]:
    """Talk for so many turns, with tools and a system text."""
    tools = [{"name": "get_time", "description": "Tell the time.", "input_schema": NO_ARGUMENTS}]
    messages: list[Any] = [{"role": "user", "content": PROMPT}]
    transcript: list[Turn] = []
    for turn in range(turns):
        answer = anthropic_client(server).messages.create(
            model="m",
            max_tokens=24,
            system="the dog",
            messages=messages,
            tools=tools,
            extra_body={"temperature": 0},
        )
        text = "".join(getattr(block, block.type) for block in answer.content if block.type in ("text", "thinking"))
        calls = [block for block in answer.content if block.type == "tool_use"]
        transcript.append((text, [(call.name, json.dumps(call.input)) for call in calls]))
        messages.append({"role": "assistant", "content": [block.model_dump() for block in answer.content] or "the"})
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": "the red lamp"} for call in calls]
        messages.append({"role": "user", "content": results or f"and the lamp {turn}"})
    return transcript


def test_an_agent_with_tools_has_the_transcript_of_the_plain_server(parsers, plain_parsers):
    with counting(parsers) as counts:
        transcript = openai_agent(parsers, turns=4)
    assert transcript == openai_agent(plain_parsers, turns=4)
    assert transcript[0][1] == [("get_time", "{}")]
    assert counts["accepted_tokens"] > 0


def test_an_agent_of_anthropics_client_has_the_transcript_of_the_plain_server(parsers, plain_parsers):
    transcript = anthropic_agent(parsers, turns=4)
    assert transcript == anthropic_agent(plain_parsers, turns=4)
    assert any(text for text, _ in transcript)


def test_what_sglangs_benchmark_prints(letters):
    """It reads the meta_info of answers, and the mean over all requests in what the server says of itself."""
    body = greedy([5, 9, 6, 7], 60, {"ignore_eos": True})
    answer = letters.post_json("/generate", body)["meta_info"]
    counts = answer["dspark"]
    rounds = counts["rounds"]
    assert answer["spec_accept_length"] == pytest.approx(60 / rounds)
    assert answer["spec_cap_length"] == pytest.approx((counts["verified_tokens"] + rounds) / rounds)
    rows = answer["spec_cap_lens_histogram"]
    weighted = sum(count * number for count, number in enumerate(rows))
    assert (sum(rows), weighted) == (rounds, counts["verified_tokens"] + rounds)
    assert answer["spec_verify_ct"] == sum(answer["spec_correct_drafts_histogram"]) == rounds
    [state] = letters.get_json("/server_info")["internal_states"]
    # Its mean is over whole intervals of the log.
    assert state["avg_spec_accept_length"] == pytest.approx(letters.get_json("/dspark/stats")["accept_length"], rel=0.3)
