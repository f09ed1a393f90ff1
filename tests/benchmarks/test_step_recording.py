"""Recording a trace, against a stand-in for the server: what is asked of it, in which order, and what can go wrong."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import step_trace
from click.testing import CliRunner
from serving.client import Sampling
from serving.profiler import WARM_UP_TOKENS, record_steps
from serving.prompts import Prompt
from step_tape import recorded

from sglang_dspark.tools.launch import LaunchedServer

PROMPTS = [Prompt(index, f"prompt {index}") for index in range(3)]
SAMPLING = Sampling(max_tokens=900, temperature=0.0, ignore_eos=True, raw=True)


class Decoder:
    """Decodes a step whenever its counters are read, and some more when it is told to profile."""

    def __init__(self, num_requests, at_once=None, outcome="trace"):
        self.num_requests, self.at_once, self.outcome = num_requests, at_once or num_requests, outcome
        self.lock, self.ended = threading.Lock(), threading.Event()
        self.calls, self.steps, self.warm_up_steps, self.profile = [], 0, 0, None

    def stats(self):
        with self.lock:
            self.steps += [path for path, _ in self.calls].count("/v1/completions") == self.num_requests
            rounds = self.at_once * self.steps
            return {"steps": self.steps, "rounds": rounds, "committed_tokens": 2 * rounds}

    def post(self, path, body):
        with self.lock:
            self.calls.append((path, body))
        if path == "/v1/completions":
            self.ended.wait(20)
            return b'{"choices": []}'
        if path == "/start_profile":
            self.profile, self.warm_up_steps = body, self.steps
            threading.Timer(0.05, self.finish).start()
            return b"Start profiling.\n"
        if path == "/abort_request":
            self.ended.set()
            return b""
        return b"{}"

    def finish(self):
        self.steps += 10
        if self.outcome == "trace":
            recorded().save(Path(self.profile["output_dir"]) / f"{self.profile['profile_id']}-TP-0.trace.json.gz")
        elif self.outcome == "end":
            self.ended.set()


@contextmanager
def served(decoder):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self._answer(json.dumps(decoder.stats()).encode())

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._answer(decoder.post(self.path, body))

        def _answer(self, content):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, args=(0.01,))
    thread.start()
    server = LaunchedServer("target")  # never started: only its requests are used
    server.url = f"http://127.0.0.1:{http.server_port}"
    try:
        yield server
    finally:
        http.shutdown()
        thread.join(10)
        http.server_close()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("serving.profiler.POLL_S", 0.001)


def recording(decoder, folder):
    with served(decoder) as server:
        return record_steps(server, PROMPTS, SAMPLING, 8, ["CPU", "GPU"], folder)


def test_profile_is_taken_while_all_users_are_served(tmp_path):
    decoder = Decoder(len(PROMPTS))
    assert recording(decoder, tmp_path) == tmp_path / "steps-TP-0.trace.json.gz"
    paths = [path for path, _ in decoder.calls]
    assert paths == ["/v1/completions"] * 3 + ["/start_profile", "/abort_request"]
    bodies = [body for path, body in decoder.calls if path == "/v1/completions"]
    assert {body["prompt"] for body in bodies} == {prompt.text for prompt in PROMPTS}
    assert all(body["ignore_eos"] and not body["stream"] and body["temperature"] == 0 for body in bodies)
    assert 2 * decoder.warm_up_steps >= WARM_UP_TOKENS
    assert decoder.profile == {
        "output_dir": str(tmp_path),
        "profile_id": "steps",
        "num_steps": 10,
        "activities": ["CPU", "GPU"],
        "with_stack": False,
        "record_shapes": False,
    }


def test_command_leaves_trace_summary_and_provenance(tmp_path, monkeypatch):
    decoder, launched, output = Decoder(2), [], tmp_path / "results"

    @contextmanager
    def launch(target, *flags, env):
        launched.append((target, flags, env))
        with served(decoder) as server:
            yield server

    monkeypatch.setattr(step_trace, "LaunchedServer", launch)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"turns": ["one"]}\n')
    words = f"--target {tmp_path} --draft {tmp_path} --prompts {prompts} --output {output} --raw-prompts"
    words += " --config static:7 --concurrency 2 --steps 8"
    arguments = [*words.split(), "--server-flags", "--max-running-requests 64"]
    result = CliRunner().invoke(step_trace.main, arguments)
    assert result.exit_code == 0, result.output
    ((target, flags, env),) = launched
    assert (target, env) == (tmp_path, None)
    assert "DSPARK" in flags and flags[-2:] == ("--max-running-requests", "64")
    assert decoder.calls[0] == ("/dspark/policy", {"policy": "static", "verify_len": 7})
    assert sorted(path.name for path in output.iterdir()) == ["provenance.json", "step.json", "trace.json.gz"]
    assert json.loads((output / "step.json").read_text())["launches"] == 7
    assert json.loads((output / "provenance.json").read_text())["prompts"][0]["file"] == "prompts.jsonl"

    again = CliRunner().invoke(step_trace.main, arguments)
    assert again.exit_code == 1 and "holds a trace already" in again.output
