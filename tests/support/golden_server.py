"""The golden pair on a real server: paths, flags, and requests to it.

Requests as the front end settles them, in the form that the scheduler reads.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import shutil
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from reference_decoding import Decoded
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang_objects import model_config, partly, request, server_args

from sglang_dspark.config import DSparkConfig
from sglang_dspark.engine.requests import settle
from sglang_dspark.engine.server import DSparkServer, attach
from sglang_dspark.tools.launch import CPU_ENV, LaunchedServer, dspark_flags, open_directly

SERVER_TESTS = Path(__file__).parents[1] / "server"
GOLDEN = Path(__file__).parents[1] / "data" / "golden"
TARGET, DRAFT = GOLDEN / "target", GOLDEN / "vanilla_g7"
CASES: list[dict[str, Any]] = json.loads((DRAFT / "golden.json").read_text())["cases"]
VOCAB = range(3, 60)  # ids that the golden target's training text used
PROPOSED = [token for token in range(256) if token % 5 != 4]  # what the drafter proposes where a list says so
TINY_VOCAB = range(2, 256)  # ids of the tiny targets of ``family_targets``
EMULATION = SERVER_TESTS / "emulated_graphs"
RANDOM_LENGTHS = SERVER_TESTS / "random_lengths"
PATCHES = SERVER_TESTS / "patches"
DSPARK = dspark_flags(DRAFT)
TOL = 2e-4
"""Of logits and states in float32, of another batch shape."""
PACE_MS = 20.0
"""Milliseconds before each step, see ``policy``: requests of hundreds of tokens run for seconds on every machine."""
AUTO = {"policy": "auto"}
DRAFTER_ALONE = {"trace": True, "preset": "none"}
"""Asks for a trace that depends on nothing but the request."""

# Unlike a GPU server, a CPU server needs two things of its environment for --tp-size 2, with or without DSPARK: a build
# of torch that knows CUDA takes NCCL for usable unless the library cannot be found, and SGLang does not share one NUMA
# node between ranks unless told which cores each one gets. Compiling the parallel embedding takes half a minute.
TWO_RANKS = {"SGLANG_NCCL_SO_PATH": "none", "SGLANG_CPU_OMP_THREADS_BIND": "0|1", "TORCH_COMPILE_DISABLE": "1"}


def sitecustomized(folder: Path) -> dict[str, str]:
    """Return the environment of a server whose Python imports ``folder/sitecustomize.py`` at its start."""
    folders = [str(folder), str(PATCHES), str(EMULATION), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(folders)}


INTERPRETED = {"TRITON_INTERPRET": "1"}
"""Has Triton interpret what is decorated as a kernel from now on."""


def emulated_graphs() -> dict[str, str]:
    """Return the environment of a CPU server whose steps are replayed as on a GPU, by kernels that are interpreted."""
    return {**CPU_ENV, **INTERPRETED, "EMULATED_GRAPHS": "1"}


BUILTIN_WORKER = ("SGLANGS_OWN_ON_A_CPU", "SGLANG_DSPARK_ENGINE", "SGLANG_RAGGED_VERIFY_MODE")
"""Variables of :func:`builtin_worker`."""
# SGLang has its schedule wait for a forward's reads only on a GPU.
CHECKS_ORDER = {"CHECK_ORDER": "1", "SGLANG_ENABLE_WAR_BARRIER": "1"}
PLANTED_FAULTS = {"PLANTED_FAULTS": "1"}
"""Has whatever only advises fail on a server, see ``patching.plant_faults``."""
LATE = (*BUILTIN_WORKER, *PLANTED_FAULTS, *CPU_ENV, *INTERPRETED, "EMULATED_GRAPHS", *CHECKS_ORDER)
"""Variables that do not change what is imported where kernels are decorated to be interpreted."""


def builtin_worker(engine: str, mode: str = "static") -> dict[str, str]:
    """Return the environment of a CPU server that decodes with SGLang's own worker.

    Args:
        engine: ``scheduled``, ``builtin``, or ``auto`` for :func:`of_sglang_alone`.
        mode: ``compact`` lets requests verify different numbers of drafts.
    """
    variables = dict(zip(BUILTIN_WORKER, ("1", engine, mode), strict=True))
    if engine == "auto":
        del variables["SGLANG_RAGGED_VERIFY_MODE"]
    return variables


def golden_target(folder: Path, **config: Any) -> Path:
    """Return a copy of the golden target below ``folder``, with these keys in its config.json."""
    path = folder / "target"
    shutil.copytree(TARGET, path, dirs_exist_ok=True)
    given = json.loads((TARGET / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(given | config))
    return path


def of_sglang_alone(folder: Path) -> Path:
    """Return the golden target under the name of an architecture that our worker does not serve, see ``stand_ins``."""
    return golden_target(folder, architectures=["OfSglangAloneForCausalLM"])


def generate(server: LaunchedServer, bodies: list[dict[str, Any]], concurrency: int) -> list[dict[str, Any]]:
    """Return the answers of ``POST /generate`` in order, for ``concurrency`` requests at a time."""
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda body: server.post_json("/generate", body), bodies))


def displace(server: LaunchedServer, num_prompts: int) -> None:
    """Encode so many prompts of 150 tokens, one after the other; prefixes that were cached move to host memory."""
    noise = random.Random(3)
    for _ in range(num_prompts):
        output_ids(server, [greedy(noise.choices(VOCAB, k=150), 2)], 1)


def together(server: LaunchedServer, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the answers, in order, to requests with the same fields that arrive at once, in one body."""
    answers: list[dict[str, Any]] = server.post_json(
        "/generate", {field: [body[field] for body in bodies] for field in bodies[0]}
    )
    return answers


def call(server: LaunchedServer, path: str, key: str | None = None, body: Any = None) -> tuple[int, str]:
    """Return status and text of the answer to GET, or POST with a body, whatever the status."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else json.dumps(body).encode()
    try:
        with open_directly(urllib.request.Request(server.url + path, data, headers), timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def refused(server: LaunchedServer, path: str, body: Any) -> str:
    """Return what the server says to a request that it refuses with HTTP 400."""
    status, text = call(server, path, body=body)
    assert status == 400, text
    return text


def events(server: LaunchedServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a stream, of server-sent events or of lines."""
    status, text = call(server, path, body=body | {"stream": True})
    assert status == 200, text
    lines = (line.removeprefix("data: ") for line in text.split("\n"))
    return [json.loads(line) for line in lines if line.startswith("{")]


@contextmanager
def begun_stream(server: LaunchedServer, body: dict[str, Any]) -> Iterator[None]:
    """Have a stream begin; at the end of the block its client goes away."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/generate", json.dumps(body | {"stream": True}), headers)
    connection.getresponse().read(64)
    yield
    connection.close()


def last_answer(server: LaunchedServer, body: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of ``POST /generate``, as the last chunk of a stream has it."""
    if not body.get("stream"):
        return server.post_json("/generate", body)
    return events(server, "/generate", body)[-1]


def states_of(answer: dict[str, Any]) -> torch.Tensor:
    """Return the hidden states [n, d] that the tokens of an answer were drawn from.

    Where a forward has encoded several tokens of a request, SGLang returns a list of all their states.
    """
    entries = answer["meta_info"]["hidden_states"]
    assert len(entries) == len(answer["output_ids"])
    return torch.tensor([entry[-1] if isinstance(entry[0], list) else entry for entry in entries])


def assert_same_states(answer: dict[str, Any], expected: dict[str, Any], tol: float = TOL) -> None:
    """Compare the hidden states that the answers have; the servers may have encoded prompts in other pieces."""
    both = (answer, expected)
    shown = {"hidden_states" in one["meta_info"] for one in both}
    if shown == {False}:
        return
    assert shown == {True}
    prompts = [torch.tensor(one["meta_info"]["hidden_states"][0]) for one in both]
    shorter = min(map(len, prompts))
    torch.testing.assert_close(*(states[-shorter:] for states in prompts), atol=tol, rtol=tol)
    torch.testing.assert_close(states_of(answer), states_of(expected), atol=tol, rtol=tol)


def assert_nothing_was_awaited(server: LaunchedServer, began: int = 0) -> str:
    """Assert that no step of an emulated GPU has read values back, and that nothing was compiled for a request.

    Returns:
        The log from its character ``began`` on.
    """
    log = server.log_path.read_text()[began:]
    assert [line for line in log.splitlines() if "reads values" in line or "compiled while serving" in line] == []
    return log


def output_ids(server: LaunchedServer, bodies: list[dict[str, Any]], concurrency: int = 8) -> list[list[int]]:
    """Return the token ids of :func:`generate`."""
    return [answer["output_ids"] for answer in generate(server, bodies, concurrency)]


def rounds_of(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rounds in the trace of an answer; tokens of prefills and those inside a round have none."""
    return [entry for entry in answer["meta_info"]["dspark_trace"] if entry is not None]


def outcomes_of(answer: dict[str, Any]) -> list[tuple[int, list[int], int]]:
    """Return of each round of an answer where it began, what was drafted, and how many drafts were accepted."""
    return [(entry["start"], entry["draft"], entry["accepted"]) for entry in rounds_of(answer)]


def traced(server: LaunchedServer, body: dict[str, Any], **options: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the answer to a request with these options, and its rounds."""
    answer = server.post_json("/generate", {**body, "speculation": {"trace": True, **options}})
    return answer, rounds_of(answer)


def assert_golden_traces(
    server: LaunchedServer, cases: list[dict[str, Any]] = CASES, asked: Mapping[str, Any] = DRAFTER_ALONE
) -> None:
    """Assert text, drafts, verified and accepted counts of golden cases, and the counts of their answers."""
    for case in cases:
        with policy(server, "static"):
            answer = server.post_json("/generate", greedy(case["prompt_ids"], 64, speculation=asked))
        assert answer["output_ids"] == case["output_ids"]
        assert len(answer["meta_info"]["dspark_trace"]) == len(case["output_ids"])
        rounds = rounds_of(answer)
        assert [(r["start"], r["anchor"], r["draft"]) for r in rounds] == [
            (r["start"], r["anchor"], r["draft"]) for r in case["rounds"]
        ]
        # The last round runs past the 64 tokens.
        assert [r["accepted"] for r in rounds[:-1]] == [r["accepted"] for r in case["rounds"][:-1]]
        assert {r["verified"] for r in rounds} == {7}
        assert {len(r["confidence"]) for r in rounds} == {7}
        counts = answer["meta_info"]["dspark"]
        assert counts["rounds"] == len(rounds)
        assert counts["drafted_tokens"] == counts["verified_tokens"] == 7 * len(rounds)


def assert_rounds_of_reference(answer: dict[str, Any], expected: Decoded) -> None:
    """Assert that an answer went as ``decode_greedy``, which goes on until its context is full."""
    ids = answer["output_ids"]
    assert ids == expected.output_ids[: len(ids)]
    pairs = list(zip(rounds_of(answer), expected.rounds, strict=False))
    assert len(pairs) >= 8
    assert [r["draft"] for r, _ in pairs] == [r.block.tokens for _, r in pairs]
    assert [r["accepted"] for r, _ in pairs[:-1]] == [r.accepted for _, r in pairs[:-1]]


def relative_acceptance(server: LaunchedServer) -> float:
    """Return the drafts that the server accepts per round of the golden cases, divided by those of the traces."""
    expected = [round_["accepted"] for case in CASES for round_ in case["rounds"]]
    bodies = [greedy(case["prompt_ids"], 48, speculation=DRAFTER_ALONE) for case in CASES]
    with policy(server, "static"):
        answers = generate(server, bodies, 4)
    accepted = [entry["accepted"] for answer in answers for entry in rounds_of(answer)]
    return sum(accepted) / len(accepted) / (sum(expected) / len(expected))


@contextmanager
def counting(server: LaunchedServer) -> Iterator[dict[str, int]]:
    """Yield a dictionary that gets, when the block ends, by how much each counter of the server has grown in it."""
    before = server.get_json("/dspark/stats")
    grown: dict[str, int] = {}
    yield grown
    after = server.get_json("/dspark/stats")
    grown |= {name: after[name] - value for name, value in before.items() if type(value) is int}


def greedy(
    input_ids: list[int], max_new_tokens: int, parameters: Mapping[str, Any] | None = None, **fields: Any
) -> dict[str, Any]:
    """Return the body of a greedy request, which stops at the golden target's token 1.

    Args:
        input_ids: its prompt.
        max_new_tokens: length at which it stops.
        parameters: further sampling parameters.
        fields: further fields of the body.
    """
    usual = {"temperature": 0, "max_new_tokens": max_new_tokens, "stop_token_ids": [1]}
    return {"input_ids": input_ids, "sampling_params": {**usual, **(parameters or {})}, **fields}


def endless(
    input_ids: list[int], max_new_tokens: int, parameters: Mapping[str, Any] | None = None, **fields: Any
) -> dict[str, Any]:
    """Return the body of a request that stops only for its length; it is greedy unless ``parameters`` say otherwise."""
    usual = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    return {"input_ids": input_ids, "sampling_params": {**usual, **(parameters or {})}, **fields}


def beginning_alike(num: int, num_tokens: int = 32) -> list[dict[str, Any]]:
    """Return greedy requests to a tiny target with prompts of 2 to 60 tokens; every third begins with the same 25."""
    draw = random.Random(7)
    shared = draw.choices(TINY_VOCAB, k=25)
    prompts = [draw.choices(TINY_VOCAB, k=draw.randint(2, 35)) for _ in range(num)]
    return [endless(shared + prompt if i % 3 == 0 else prompt, num_tokens) for i, prompt in enumerate(prompts)]


OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"enabled": False},
    {"max_verify": 1},
    {"max_verify": 3, "trace": True},
    {"confidence_threshold": 0.8},
    {"preset": "summarization"},
    {"preset": "summarization", "min_ngram": 1, "max_ngram": 2, "max_draft": 2, "max_verify": 5},
    {"preset": "summarization", "min_ngram": 1, "confidence_threshold": 0.9},
    {"preset": "classification", "candidates": ["red stone . the large", "large stone finds the small", "blue"]},
)
"""Values of the field ``speculation``, one of every kind."""


def with_options(bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the same requests with these options in turn."""
    return [{**body, "speculation": OPTIONS[i % len(OPTIONS)]} for i, body in enumerate(bodies)]


@contextmanager
def policy(server: LaunchedServer, name: str, afterwards: Mapping[str, Any] = AUTO, **fields: Any) -> Iterator[None]:
    """Verify by this policy inside the block, and by the server's own after it.

    Args:
        afterwards: the server's own, with its fields.
        fields: of the policy, and ``pace_ms``, which keeps a server of the tests from going on faster.
    """
    assert server.post_json("/dspark/policy", {"policy": name, **fields})["policy"] == name
    try:
        yield
    finally:
        server.post_json("/dspark/policy", afterwards)


def in_background(function: Callable[[], Any]) -> threading.Thread:
    """Start ``function`` in a thread."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def prompts(num: int, seed: int) -> list[list[int]]:
    """Return random prompts of very different lengths; every third starts with the same 40 tokens."""
    rng = random.Random(seed)
    shared = rng.choices(VOCAB, k=40)
    lengths = (1, 3, 17, 40, 90, 130)
    return [(shared if i % 3 == 0 else []) + rng.choices(VOCAB, k=rng.choice(lengths)) for i in range(num)]


def mixed_bodies(num: int, seed: int) -> list[dict[str, Any]]:
    """Return greedy requests of very different lengths."""
    rng = random.Random(seed)
    return [greedy(prompt, rng.choice((1, 2, 5, 8, 30, 64))) for prompt in prompts(num, seed)]


def assert_cut_at_the_limit(texts: list[list[int]], expected: list[list[int]]) -> None:
    """Assert that texts of a server with a short context are these, or one token shorter, which SGLang keeps back."""
    for text, whole in zip(texts, expected, strict=True):
        assert text == whole[: len(text)]
        assert len(whole) - len(text) <= 1


@contextmanager
def while_running(server: LaunchedServer, body: dict[str, Any]) -> Iterator[None]:
    """Have a request run all the while; it ends with the block, and must not before."""
    answers: list[dict[str, Any]] = []
    thread = in_background(lambda: answers.extend(generate(server, [body], 1)))
    wait_for_running(server, 1)
    try:
        yield
    finally:
        call(server, "/abort_request", body={"abort_all": True})
        thread.join()
    assert answers[0]["meta_info"]["finish_reason"]["type"] == "abort"


def wait_until(condition: Callable[[], bool]) -> None:
    """Return when it is true."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_for_tokens(server: LaunchedServer, since: dict[str, Any], tokens: int) -> None:
    """Return when steps have committed so many tokens since the server had these statistics."""
    wait_until(lambda: server.get_json("/dspark/stats")["committed_tokens"] >= since["committed_tokens"] + tokens)


def wait_for_running(server: LaunchedServer, requests: int, state: str = "running") -> None:
    """Return when so many requests are under way, or in another state that SGLang counts."""
    wait_until(lambda: server.get_json("/v1/loads")["loads"][0][f"num_{state}_reqs"] >= requests)


def assert_retracted_unnoticed(server: LaunchedServer, bodies: list[dict[str, Any]], expected: list[list[int]]) -> None:
    """Assert that some of these requests are retracted and prefilled again, and that their texts do not show it.

    Args:
        bodies: of requests whose texts do not fit into the K/V pool together, while their prompts do: they arrive at
            once and grow alike, so that none has ended when the pool is full.
        expected: their tokens.
    """
    answers = together(server, bodies)
    assert [answer["output_ids"] for answer in answers] == expected
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0
    assert_pool_is_whole(server)


def assert_pool_is_whole(server: LaunchedServer) -> None:
    """Assert that every K/V slot is free after all requests and a flush. SGLang checks for leaks when it is idle."""
    deadline = time.monotonic() + 60
    while server.get_json("/v1/loads")["loads"][0]["num_running_reqs"] > 0:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    server.flush_cache()
    time.sleep(0.2)
    assert server.post_json("/generate", greedy([5, 6, 7], 4))["output_ids"]
    assert "memory leak" not in server.log_path.read_text()


SETTLED_VOCAB = 0x110000


class LetterTokenizer:
    """A token for each letter."""

    def __init__(self):
        self.calls = 0

    def __call__(self, texts, add_special_tokens):
        assert not add_special_tokens
        self.calls += 1
        return {"input_ids": [[ord(letter) for letter in text] for text in texts]}


def settled(field, tokenizer=None, vocab_size=SETTLED_VOCAB, **options):
    """The scheduler-side request of one with this field ``speculation``, on a server with these options."""
    return settled_params({"dspark": field}, tokenizer, vocab_size, **options)


def settled_params(custom_params, tokenizer=None, vocab_size=SETTLED_VOCAB, **options):
    """The same of one with these ``custom_params``."""
    made, args = request(prompt=[1, 2], custom_params=custom_params), server_args()
    attach(args, DSparkServer(DSparkConfig(**options), drafter=None, dummy_draft=False))
    target = model_config(vocab_size=vocab_size)
    settle(partly(TokenizerManager, tokenizer=tokenizer, server_args=args, model_config=target), made.sampling_params)
    return made
