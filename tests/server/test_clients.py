"""Tests of official clients and benchmarks, next to a plain server: routes, streams, tools, turns, counts.

OpenAI's client also sends a ``prediction``. The programs in ``examples`` are clients, too.
"""

from __future__ import annotations

import io
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import anthropic
import httpx
import httpx2
import openai
import pytest
from family_targets import TOOL_CALL, spoken_target
from golden_replay import tuned
from golden_server import DRAFT, TARGET, counting, greedy, policy, refused

from sglang_dspark.tools.launch import CPU_ENV, CPU_FLAGS, LaunchedServer, free_port

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


def agent(server: LaunchedServer) -> list[Turn]:
    """Return the turns of a client that answers calls of tools; without one, it goes on asking."""
    messages: list[Any] = [{"role": "user", "content": PROMPT}]
    transcript: list[Turn] = []
    for turn in range(4):
        # After these tokens the target writes a call.
        extra = {"separate_reasoning": False} | ({"input_ids": TOOL_CALL} if turn == 0 else {})
        asked = {"model": "m", "temperature": 0, "max_tokens": 7 if turn == 0 else 24, "tools": TOOLS}
        answer = openai_client(server).chat.completions.create(messages=messages, extra_body=extra, **asked)
        said = answer.choices[0].message
        calls = said.tool_calls or []
        transcript.append((said.content or "", [(call.function.name, call.function.arguments) for call in calls]))
        kept = {"tool_calls": [call.model_dump() for call in calls]} if calls else {}
        messages.append({"role": "assistant", "content": said.content or "", **kept})
        answers = [{"role": "tool", "tool_call_id": call.id, "content": "the red lamp"} for call in calls]
        messages += answers or [{"role": "user", "content": f"and the lamp {turn}"}]
    return transcript


def test_an_agent_with_tools_has_the_transcript_of_the_plain_server(parsers, plain_parsers):
    with counting(parsers) as counts:
        transcript = agent(parsers)
    assert transcript == agent(plain_parsers)
    assert transcript[0][1] == [("get_time", "{}")]
    assert counts["accepted_tokens"] > 0


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


LENGTH = 48
CHAT = {"model": "m", "max_tokens": LENGTH, "temperature": 0, "messages": [{"role": "user", "content": PROMPT}]}


def asked(server: LaunchedServer, stream: bool, **fields: Any) -> tuple[str, Any]:
    """The text of an answer, and its usage."""
    if stream:
        fields["stream_options"] = {"include_usage": True}
    how = {"extra_body": {"ignore_eos": True}, "stream": stream}
    answer = openai_client(server).chat.completions.create(**CHAT, **how, **fields)
    if not stream:
        return answer.choices[0].message.content, answer.usage
    chunks = list(answer)
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices), chunks[-1].usage


def content(text: Any) -> dict[str, Any]:
    return {"type": "content", "content": text}


@pytest.fixture
def expected(plain_letters: LaunchedServer) -> str:
    return unpredicted(plain_letters)


@cache
def unpredicted(server: LaunchedServer) -> str:
    return asked(server, False)[0]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_predicted_text_is_accepted_and_counted(letters, expected, stream):
    """It comes as a text, in parts, and in the middle of another one."""
    half = len(expected) // 2
    parts = [{"type": "text", "text": text} for text in (expected[:half], expected[half:])]
    for predicted in (expected, parts, "красный 猫: " + expected + " 🐈"):
        with policy(letters, "static"):  # ``auto`` may find non-speculative steps faster
            text, usage = asked(letters, stream, prediction=content(predicted))
        details = usage.completion_tokens_details
        assert text == expected
        assert LENGTH * 0.6 < details.accepted_prediction_tokens < usage.completion_tokens == LENGTH
        assert details.rejected_prediction_tokens >= 0


def test_where_the_text_leaves_its_prediction_drafts_are_rejected(letters, expected):
    with policy(letters, "static"):
        text, usage = asked(letters, True, prediction=content(expected[:24] + "☂" * 24))
    details = usage.completion_tokens_details
    assert text == expected
    assert details.accepted_prediction_tokens > 0 and details.rejected_prediction_tokens > 0


@pytest.mark.parametrize(
    "predicted",
    ["", [], "совсем другое: 猫 고양이 قطة", "\u200b", "a" * 32768],
    ids=["nothing", "no part", "other", "blank", "long"],
)
def test_whatever_is_predicted_the_text_is_the_same(letters, expected, predicted):
    text, usage = asked(letters, False, prediction=content(predicted))
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
    body = CHAT | {"ignore_eos": True, "n": 3, "prediction": content(expected)}
    with policy(letters, "static"):
        found = letters.post_json("/v1/chat/completions", body)
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
    for stream in (False, True):
        text = refused(letters, "/v1/chat/completions", CHAT | {"prediction": predicted, "stream": stream})
        assert named in text and "speculation" not in text and ("prediction " in text or "surrogate" in named)


def test_tokens_that_the_target_does_not_have_are_left_out(letters):
    plain = letters.post_json("/v1/chat/completions", CHAT)["choices"][0]["message"]["content"]
    predicted = content("<beyond>" + plain + "<beyond>")
    with policy(letters, "static"):
        found = letters.post_json("/v1/chat/completions", CHAT | {"prediction": predicted})
    assert found["choices"][0]["message"]["content"] == plain
    assert found["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0


EXAMPLES = Path(__file__).parents[2] / "examples"


def output_of(name: str, *arguments: Any, folder: Path = EXAMPLES) -> str:
    """Run an example, and return what it prints."""
    command = [sys.executable] if name.endswith(".py") else ["bash"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, **CPU_ENV, "PATH": path, "NO_PROXY": "*"}
    env |= {"PORT": str(free_port()), "STEPS": "4", "PROMPTS": "8", "DRAIN": "2"}
    command += [str(EXAMPLES / name), *map(str, arguments)]
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_example(name: str, *arguments: Any, **options: Any) -> None:
    """Run an example; its lines name and promise what those of its committed output do."""
    assert_promised(name, output_of(name, *arguments, **options))


def run_client(name: str, *arguments: Any) -> None:
    """Do the same in this process, which has imported the client's library already."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as printed:
        patch.setattr(sys, "argv", [name, *map(str, arguments)])
        patch.setenv("NO_PROXY", "*")
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert_promised(name, printed.getvalue())


def assert_promised(name: str, printed: str) -> None:
    expected = (EXAMPLES / "output" / name).with_suffix(".txt").read_text()
    assert shown(printed) == shown(expected)


def shown(text: str) -> list[str]:
    """Return what the lines name, with the value if it is a promise; lines of quoted tokens name nothing."""
    found = [line.partition(": ") for line in text.splitlines() if not line.startswith(("'", '"'))]
    return [name + (value if value in ("0", "True") else "") for name, colon, value in found if colon]


@pytest.mark.parametrize("name", ["speculation_per_request.py", "log_probabilities.py", "several_turns.py"])
def test_an_example_runs(letters, name):
    run_client(name, letters.url)


@pytest.mark.thorough
def test_the_example_with_json_and_tools_runs(smollm2):
    run_client("json_and_tools.py", smollm2.url)


def test_the_example_next_to_a_plain_server_runs(letters, plain_letters):
    run_client("compare_with_plain.py", letters.url, plain_letters.url)


def test_the_example_of_new_weights_runs(letters, tmp_path):
    try:
        run_client("new_weights.py", tuned(tmp_path / "target"), letters.url)
    finally:
        letters.post_json("/update_weights_from_disk", {"model_path": str(TARGET)})


OWN_SERVERS = (*CPU_FLAGS, "--dtype", "float32", "--chat-template", "chatml")


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["start_and_ask.sh", "engine.py", "two_replicas.sh"])
def test_an_example_that_starts_servers_runs(tmp_path, name):
    run_example(name, TARGET, DRAFT, *OWN_SERVERS, folder=tmp_path)


@pytest.mark.thorough
def test_a_service_changes_its_worker_and_back_without_losing_an_answer(tmp_path):
    run_example("change_worker.sh", TARGET, DRAFT, "", *OWN_SERVERS, folder=tmp_path)


@pytest.mark.thorough
def test_the_example_of_a_drafter_of_ones_own_runs(tmp_path):
    target = spoken_target(tmp_path)
    template = target / "chat_template.jinja"
    template.write_text("the dog " + template.read_text())  # the target invents what follows
    assert "Ready." in output_of("own_drafter.sh", target, tmp_path / "output", folder=tmp_path)
