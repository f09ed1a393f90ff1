"""Texts of the target in process, and of a stand-in for an SGLang server."""

import json
import threading
from copy import deepcopy
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from dspark_training.target import Target
from dspark_training.writers import InProcessWriter, ServerWriter

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
    return writer.write(prompts, temperatures, 20, 0)


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
        writer.write([[3]], [0.0], 4, 0)


PROMPTS = [[5, 9, 11], [7, 3, 8, 20, 33, 41], [60, 4], [12, 13, 14, 15, 16]]


def greedy_alone(target, prompt, max_new_tokens):
    """Greedy continuation of one prompt, the whole text run again for every token."""
    ids = list(prompt)
    for _ in range(max_new_tokens):
        ids.append(int(target.model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in target.stop_ids:
            break
    return ids


@pytest.mark.parametrize("batch", [1, 3, 64])
def test_texts_in_process_are_those_of_each_prompt_alone(target, batch):
    """Some end early, at different steps; a penalty that the checkpoint suggests changes nothing."""
    free = [greedy_alone(target, prompt, 12) for prompt in PROMPTS]
    model = deepcopy(target.model)
    model.generation_config.update(eos_token_id=[free[0][5], free[2][6]], repetition_penalty=5.0)
    stopping = Target(model, target.tap_ids)
    counted = []
    writer = InProcessWriter(stopping, batch=batch, on_progress=counted.append)
    texts = writer.write(PROMPTS, [0.0] * 4, 12, seed=1)
    expected = [greedy_alone(stopping, prompt, 12) for prompt in PROMPTS]
    assert [text.input_ids.tolist() for text in texts] == expected
    assert min(len(ids) - len(prompt) for ids, prompt in zip(expected, PROMPTS, strict=True)) < 12
    assert sum(counted) == 4


def test_sampled_tokens_follow_the_distribution_of_the_target(target):
    prompt = PROMPTS[1]
    probs = torch.softmax(target.model(torch.tensor([prompt])).logits[0, -1] / 0.7, dim=-1)
    texts = InProcessWriter(target, batch=4000).write([prompt] * 4000, [0.7] * 4000, 1, seed=3)
    counts = torch.bincount(torch.tensor([int(text.input_ids[-1]) for text in texts]), minlength=64)
    # Half the L1 distance of 4000 draws to their own distribution is about 0.4 * sqrt(64 / 4000) = 0.05 at most.
    assert float((counts / 4000 - probs).abs().sum() / 2) < 0.06
