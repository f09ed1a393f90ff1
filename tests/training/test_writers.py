"""Texts from a stand-in for an SGLang server."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from dspark_training import server_writer
from dspark_training.writers import OwnServerWriter, ServerWriter

from sglang_dspark.errors import ConfigError, DSparkError

STOP = 1


class Server(ThreadingHTTPServer):
    """Answers ``[7, 8, ..., STOP]``, one token per token of the prompt; `cut` leaves the stop token out."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.requests = []
        self.cut = False
        self.first_token = 7


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, self.headers["Authorization"], body))
        if body["input_ids"] == [9, 9]:
            self.send_error(400, "no such luck")
            return
        output = [self.server.first_token + i for i in range(len(body["input_ids"]))]
        output += [] if self.server.cut else [STOP]
        answer = {"output_ids": output, "meta_info": {"finish_reason": {"type": "stop", "matched": STOP}}}
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with Server() as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()


def write(server, prompts, temperatures, **options):
    writer = ServerWriter(server.url + "/", frozenset({STOP}), 64, concurrency=2, **options)
    return writer.write(prompts, temperatures, 20, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("cut", [False, True])
def test_token_ids_go_in_and_come_out_in_order(server, cut):
    server.cut = cut
    rows = write(server, [[3], [4, 5], [6, 6, 6]], [0.0, 1.0, 0.7])
    assert [row.input_ids.tolist() for row in rows] == [[3, 7, 1], [4, 5, 7, 8, 1], [6, 6, 6, 7, 8, 9, 1]]
    assert [row.prompt_len for row in rows] == [1, 2, 3]


def test_what_the_server_is_asked(server):
    write(server, [[3], [4]], [0.0, 0.7], api_key="secret")
    asked = {body["input_ids"][0]: (path, key, body["sampling_params"]) for path, key, body in server.requests}
    everything = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "stop_token_ids": [STOP], "max_new_tokens": 20}
    assert asked[3] == ("/generate", "Bearer secret", everything | {"temperature": 0.0})
    seed = asked[4][2].pop("sampling_seed")
    assert asked[4] == ("/generate", "Bearer secret", everything | {"temperature": 0.7})
    write(server, [[3], [4]], [0.0, 0.7])
    assert {seed} == {body["sampling_params"].get("sampling_seed", seed) for _, _, body in server.requests[2:]}


def test_a_refused_prompt_ends_the_stage(server):
    with pytest.raises(DSparkError, match=r"(?s)/generate: HTTP 400: .*no such luck"):
        write(server, [[9, 9]], [0.0])


def test_tokens_that_are_not_the_targets(server):
    server.first_token = 64
    with pytest.raises(ConfigError, match="below the target's vocab_size=64; check that the server serves"):
        write(server, [[3]], [0.0])


def test_nobody_answers(server):
    writer = ServerWriter("http://127.0.0.1:9", frozenset(), 64, concurrency=1)
    with pytest.raises(ConfigError, match=r"--server http://127\.0\.0\.1:9: .*check that an SGLang server"):
        writer.write([[3]], [0.0], 4, torch.Generator())


@pytest.fixture
def launched(server, monkeypatch):
    """Every server that a writer launches, as a list of what happened; the stand-in answers for all of them."""
    events = []

    class Launched:
        url = server.url

        def __init__(self, target, *flags, env, startup_timeout_s):
            assert startup_timeout_s >= 3600  # a target of the hub is fetched first
            self._asked = (target, flags, dict(env))

        def __enter__(self):
            events.append(self._asked)
            return self

        def __exit__(self, *error):
            events.append("stopped")

    monkeypatch.setattr(server_writer, "LaunchedServer", Launched)
    return events


def test_a_server_of_its_own_runs_from_the_first_text_to_the_end(launched):
    with OwnServerWriter("model", "cuda:1", "bfloat16", frozenset({STOP}), 64, 2) as writer:
        assert launched == []
        for _ in range(2):
            [row] = writer.write([[3]], [0.0], 20, torch.Generator())
            assert row.input_ids.tolist() == [3, 7, 1]
        assert launched == [("model", ("--base-gpu-id", "1", "--dtype", "bfloat16"), {})]
    assert launched[1:] == ["stopped"]


def test_texts_that_are_there_need_no_server(launched):
    with OwnServerWriter("model", "cpu", "float32", frozenset({STOP}), 64, 2) as writer:
        assert writer.stop_ids == {STOP}
    assert launched == []


def test_a_server_of_its_own_is_stopped_after_a_failure(launched):
    def fail():
        with OwnServerWriter("model", "cuda", "bfloat16", frozenset({STOP}), 64, 2) as writer:
            writer.write([[9, 9]], [0.0], 20, torch.Generator())

    with pytest.raises(DSparkError, match="no such luck"):
        fail()
    assert launched[-1] == "stopped"
