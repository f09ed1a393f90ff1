"""Does a request reach a server with DSPARK as it was meant if SGLang's router stands in front of two of them?

    python -m venv ROUTER && ROUTER/bin/pip install sglang-router==0.3.2
    python benchmarks/router.py --router ROUTER/bin/python --target T --draft D --output benchmarks/results/router.json

Every request asks not to speculate, in the body or in the header, and its answer says how many drafts were verified:
none if a server was told. Then a server is taken out of the router while it answers, as before a restart, and the other
way round a server is killed while both answer. The texts of all answers are compared with those of a server asked
directly.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any

import click

from sglang_dspark.engine.api.http import HEADER
from sglang_dspark.tools import provenance
from sglang_dspark.tools.http_client import open_directly
from sglang_dspark.tools.launch import CPU_ENV, CPU_FLAGS, LaunchedServer, dspark_flags, free_port

OFF = {"enabled": False}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Count to ten."}], "max_tokens": 24},
    "/v1/completions": {"prompt": "One, two, three,", "max_tokens": 24},
    "/generate": {"text": "One, two, three,", "sampling_params": {"max_new_tokens": 24, "temperature": 0}},
}
LONG = {"prompt": "One, two, three,", "max_tokens": 800, "temperature": 0, "ignore_eos": True}
REQUESTS = 8
STATIC = ("--speculative-dspark-schedule", "static")  # drafts are verified for every request that does not object


def ask(url: str, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> tuple[int, Any]:
    """Return status and answer to a POST."""
    sent = {"Content-Type": "application/json", **(headers or {})}
    data = json.dumps({"model": "default", **body}).encode()
    try:
        with open_directly(urllib.request.Request(url + path, data, sent), timeout=300) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")


def stream(url: str, body: Mapping[str, Any]) -> str:
    """Return the text of a stream of the completions route.

    Raises:
        OSError: the stream has no end.
    """
    data = json.dumps({"model": "default", "stream": True, **body}).encode()
    request = urllib.request.Request(url + "/v1/completions", data, {"Content-Type": "application/json"})
    with open_directly(request, timeout=300) as response:
        events = [line.removeprefix("data: ") for line in response.read().decode().splitlines() if line]
    if events[-1] != "[DONE]":
        raise ConnectionResetError
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


def drafts_verified(answer: Any) -> int:
    """Return how many drafts were verified for an answer of any route."""
    if "meta_info" in answer:
        return int(answer["meta_info"]["dspark"]["verified_tokens"])
    return int(answer["metrics"]["speculative_decoding"]["num_draft_tokens"])


def doors(router: str) -> dict[str, dict[str, str]]:
    """Return, by route, what becomes of the field of a body, of the header, and of a bad header."""
    found: dict[str, dict[str, str]] = {}
    for path, body in BODIES.items():
        assert drafts_verified(ask(router, path, body)[1]) > 0, "a request that asks for nothing speculates"
        given: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
            "field": ({"speculation": OFF}, {}),
            "header": ({}, {HEADER: json.dumps(OFF)}),
        }
        found[path] = {}
        for door, (fields, headers) in given.items():
            status, answer = ask(router, path, {**body, **fields}, headers)
            assert status == 200, answer
            found[path][door] = "dropped" if drafts_verified(answer) else "arrives"
        status, _ = ask(router, path, body, {HEADER: json.dumps({"enabled": 3})})
        found[path]["bad header"] = f"HTTP {status}"
    chat = "/v1/chat/completions"
    prediction = {"prediction": {"type": "content", "content": "One, two"}}
    details = ask(router, chat, {**BODIES[chat], **prediction})[1]["usage"]["completion_tokens_details"] or {}
    found[chat]["prediction"] = "arrives" if "accepted_prediction_tokens" in details else "dropped"
    return found


def while_both_answer(router: str, expected: str, act: Callable[[], None]) -> dict[str, Any]:
    """Do something while both servers answer long requests, every other one a stream; return how these end."""
    with ThreadPoolExecutor(2 * REQUESTS) as pool:
        whole = [pool.submit(ask, router, "/v1/completions", LONG) for _ in range(REQUESTS)]
        streams = [pool.submit(stream, router, LONG) for _ in range(REQUESTS)]
        time.sleep(1.0)
        act()
        running = sum(not future.done() for future in (*whole, *streams))
        return {
            "running": running,
            "answers": dict(Counter(_end(lambda of=future: _text(*of.result()), expected) for future in whole)),
            "streams": dict(Counter(_end(future.result, expected) for future in streams)),
        }


def _text(status: int, answer: Any) -> str:
    if status != 200:
        raise OSError(f"HTTP {status}")
    return str(answer["choices"][0]["text"])


def _end(text: Callable[[], str], expected: str) -> str:
    try:
        return "right" if text() == expected else "another text"
    except (OSError, HTTPException) as error:
        return str(error) if str(error).startswith("HTTP") else "cut"


@contextmanager
def launched_router(python: str, workers: list[str]) -> Iterator[str]:
    """Yield the address of a router in front of these servers."""
    port, url = free_port(), ""
    url = f"http://127.0.0.1:{port}"
    command = [python, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(free_port()), "--policy", "round_robin", "--worker-urls", *workers]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while len(_workers(url)) < len(workers):
            assert time.monotonic() < deadline, "the router does not start"
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait()


def _workers(url: str) -> dict[str, str]:
    """Return the router's ids of its healthy servers, by address."""
    try:
        with open_directly(url + "/workers", timeout=10) as response:
            return {worker["url"]: worker["id"] for worker in json.load(response)["workers"] if worker["is_healthy"]}
    except OSError:
        return {}


@click.command()
@click.option("--router", "python", required=True, help="A Python that has sglang-router.")
@click.option("--target", required=True)
@click.option("--draft", required=True)
@click.option("--output", type=click.Path(path_type=Path), required=True)
def main(python: str, target: str, draft: str, output: Path) -> None:
    """Command line; see the module."""
    table = Path(tempfile.mkdtemp()) / "step_times.json"
    flags = (*CPU_FLAGS, "--dtype", "float32", "--chat-template", "chatml", *dspark_flags(draft), *STATIC)
    env = {**CPU_ENV, "SGLANG_DSPARK_SPS_TABLE_PATH": str(table)}
    with ExitStack() as stack:
        servers = [stack.enter_context(LaunchedServer(target, *flags, env=env)) for _ in range(2)]
        expected = ask(servers[0].url, "/v1/completions", LONG)[1]["choices"][0]["text"]
        router = stack.enter_context(launched_router(python, [server.url for server in servers]))
        before = [server.get_json("/dspark/stats")["rounds"] for server in servers]
        found: dict[str, Any] = {"doors": doors(router)}
        found["quiet"] = while_both_answer(router, expected, lambda: None)
        after = [server.get_json("/dspark/stats")["rounds"] for server in servers]
        found["servers that answered"] = sum(now > then for now, then in zip(after, before, strict=True))
        found["own routes of a server"] = f"HTTP {_status_of_get(router + '/dspark/stats')}"
        leaving = _workers(router)[servers[1].url]

        def take_out() -> None:
            request = urllib.request.Request(f"{router}/workers/{leaving}", method="DELETE")
            open_directly(request, timeout=30).close()

        found["one taken out"] = while_both_answer(router, expected, take_out)
        found["requests after that"] = while_both_answer(router, expected, lambda: None)
        ask(router, "/workers", {"url": servers[1].url})
        while len(_workers(router)) < 2:
            time.sleep(0.5)
        found["one killed"] = while_both_answer(router, expected, lambda: os.killpg(servers[1].pid, signal.SIGKILL))
        found["requests after its death"] = while_both_answer(router, expected, lambda: None)
    version = subprocess.run(
        [python, "-c", "from importlib.metadata import version; print(version('sglang-router'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    provenance.write_json(output, {"sglang_router": version, "requests": REQUESTS, **found, **provenance.record()})
    print(json.dumps(found, indent=2))


def _status_of_get(url: str) -> int:
    try:
        with open_directly(url, timeout=30) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


if __name__ == "__main__":
    sys.exit(main())
