"""Tests of two replicas behind two tokenizer workers, and of one server on two machines.

The machines are two processes here that share no memory, and talk over the loopback device.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from golden_server import (
    CASES,
    DSPARK,
    SERVER_TESTS,
    TARGET,
    TWO_RANKS,
    VOCAB,
    call,
    endless,
    generate,
    greedy,
    mixed_bodies,
    output_ids,
    policy,
    rounds_of,
    sitecustomized,
    wait_for_running,
)

from sglang_dspark.tools.launch import CPU_ENV, CPU_FLAGS, LaunchedServer, free_port

pytestmark = pytest.mark.thorough


COUNTS = ("rounds", "drafted_tokens", "verified_tokens", "accepted_tokens")


@contextmanager
def counting_each(server) -> Iterator[list[dict[str, int]]]:
    """Yield a list that gets, when the block ends, what each replica has counted in it, after what all have."""
    before = server.get_json("/dspark/stats")
    grown: list[dict[str, int]] = []
    yield grown
    after = server.get_json("/dspark/stats")
    for then, now in zip([before, *before["replicas"]], [after, *after["replicas"]], strict=True):
        grown.append({name: now[name] - then[name] for name in COUNTS})


def test_texts_and_counts(replicas, plain):
    bodies = mixed_bodies(24, seed=5)
    with counting_each(replicas) as grown:
        answers = generate(replicas, bodies, 8)
    assert [answer["output_ids"] for answer in answers] == output_ids(plain, bodies)
    for place, counts in enumerate(grown):
        told = [a["meta_info"] for a in answers if place == 0 or a["meta_info"]["dp_rank"] == place - 1]
        expected = {name: sum(info.get("dspark", {}).get(name, 0) for info in told) for name in COUNTS}
        assert counts == expected
        assert counts["accepted_tokens"] > 0


def test_a_policy_reaches_every_replica(replicas):
    with policy(replicas, "static", verify_len=2):
        with counting_each(replicas) as grown:
            output_ids(replicas, [greedy(case["prompt_ids"], 24) for case in CASES[:8]])
        assert [replica["policy"] for replica in replicas.get_json("/dspark/stats")["replicas"]] == ["static"] * 2
    assert all(counts["verified_tokens"] == 2 * counts["rounds"] > 0 for counts in grown)
    assert call(replicas, "/dspark/policy", body={"policy": "none"})[0] == 400


def test_step_times_are_measured_once(replicas):
    lines = [line for line in replicas.log_path.read_text().splitlines() if "DSPARK" in line]
    written, read = ([line for line in lines if f"step times {word}" in line] for word in ("written to", "from"))
    assert (len(written), len(read)) == (1, 1)
    assert " DP0] " in written[0] and " DP1] " in read[0]
    assert all(replica["schedule"]["step_time"] for replica in replicas.get_json("/dspark/stats")["replicas"])


def test_metrics_are_of_each_replica(replicas):
    metrics = call(replicas, "/metrics")[1].splitlines()
    steps = [line for line in metrics if line.startswith("sglang:dspark_steps_total{")]
    assert all(any(f'dp_rank="{rank}"' in line for line in steps) for rank in range(2))
    assert replicas.get_json("/dspark/capabilities")["features"]["data_parallel_size"] == 2


@pytest.mark.parametrize("worker", [0, 1])
def test_every_tokenizer_worker_reads_and_checks_requests(replicas, worker):
    found = [child for child in psutil.Process(replicas.pid).children() if "tokenizer_worker" in child.cmdline()[0]]
    assert len(found) == 2
    [other] = [process for process in found if process != found[worker]]
    case = CASES[0]
    other.suspend()
    try:
        [answer] = generate(replicas, [greedy(case["prompt_ids"], 8, speculation={"max_verify": 1, "trace": True})], 1)
        refused = call(replicas, "/generate", body=greedy([5], 2, speculation={"max_verify": "x"}))
        unserved = call(replicas, "/generate", body=greedy([5, -7], 2))
        prediction = {"type": "content", "content": "red stone"}
        chat = {"model": "m", "messages": [{"role": "user", "content": "red"}], "max_tokens": 4}
        predicted = replicas.post_json("/v1/chat/completions", {**chat, "prediction": prediction})
        page = call(replicas, "/dspark")
        stats = replicas.get_json("/dspark/stats")
    finally:
        other.resume()
    assert answer["output_ids"] == case["output_ids"][:8]
    assert {entry["verified"] for entry in rounds_of(answer)} <= {0, 1}
    assert refused[0] == 400 and "speculation.max_verify" in refused[1]
    assert unserved[0] == 400 and "-7" in unserved[1]
    assert "accepted_prediction_tokens" in predicted["usage"]["completion_tokens_details"]
    assert page[0] == 200
    now = replicas.get_json("/dspark/stats")
    assert [stats[name] for name in COUNTS] == [now[name] for name in COUNTS]


def test_a_server_ends_with_one_of_its_schedulers(replicas):
    """The last test of this server."""
    controller = _child(psutil.Process(replicas.pid), "data_parallel_controller")
    _child(controller, "scheduler_DP1").kill()
    deadline = time.monotonic() + 60
    while replicas.exit_status is None:
        assert time.monotonic() < deadline, "the server goes on without a replica"
        time.sleep(0.2)
    assert "of a replica has ended with status -9. The server ends" in replicas.log_path.read_text()


def _child(process: psutil.Process, name: str) -> psutil.Process:
    return next(child for child in process.children() if name in child.cmdline()[0])


FLAGS = (
    *(*CPU_FLAGS, "--dtype", "float32", *DSPARK, "--tp-size", "2", "--nnodes", "2"),
    *("--max-running-requests", "4", "--speculative-dspark-block-size", "3"),
)


class Pair(NamedTuple):
    """The machines, of which the first one answers requests, and the files of their step times."""

    leader: LaunchedServer
    follower: LaunchedServer
    tables: list[Path]


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("nodes")
    meeting = f"127.0.0.1:{free_port()}"
    env = {**CPU_ENV, **sitecustomized(SERVER_TESTS / "two_machines"), **TWO_RANKS}
    tables = [folder / f"step_times_{rank}.json" for rank in range(2)]
    nodes = [
        LaunchedServer(
            TARGET,
            *(*FLAGS, "--dist-init-addr", meeting, "--node-rank", str(rank)),
            env={**env, "SGLANG_DSPARK_SPS_TABLE_PATH": str(tables[rank])},
        )
        for rank in range(2)
    ]
    with ExitStack() as stack:
        with ThreadPoolExecutor(2) as pool:  # neither is healthy before the other
            for started in [pool.submit(stack.enter_context, node) for node in nodes]:
                started.result()
        yield Pair(*nodes, tables)


def test_greedy_text_of_two_machines(pair):
    rng = random.Random(1)
    bodies = [greedy(rng.choices(VOCAB, k=rng.choice((1, 17, 90))), rng.choice((1, 5, 30))) for _ in range(16)]
    expected = [case["output_ids"] for case in CASES]
    with policy(pair.leader, "off"):
        plain = output_ids(pair.leader, bodies)
    assert output_ids(pair.leader, [greedy(case["prompt_ids"], 64) for case in CASES]) == expected
    assert output_ids(pair.leader, bodies) == plain
    assert pair.leader.get_json("/dspark/stats")["accept_length"] > 2


def test_one_machine_decides_and_answers(pair):
    """Step times are measured once; of the other machine only its health can be asked."""
    assert [table.exists() for table in pair.tables] == [True, False]
    assert pair.leader.get_json("/dspark/stats")["schedule"]["step_time"] is not None
    assert [call(pair.follower, path)[0] for path in ("/health", "/dspark/stats")] == [200, 404]
    assert "DSPARK: 2 nodes: " in pair.leader.log_path.read_text()


def test_a_machine_that_dies_ends_the_other_and_is_named(pair):
    """The last test of this pair. Its requests end, both machines do, and the one that lived on says why."""
    fronts = [psutil.Process(node.pid) for node in (pair.leader, pair.follower)]
    [rank] = [child for child in fronts[1].children(recursive=True) if "_TP1" in " ".join(child.cmdline())]
    with ThreadPoolExecutor(1) as pool:
        request = pool.submit(call, pair.leader, "/generate", body=endless([5, 6, 7], 900, stream=True))
        wait_for_running(pair.leader, 1)
        rank.kill()
        assert isinstance(request.exception(60), OSError | HTTPException)
    statuses = [front.wait(60) for front in fronts]
    assert statuses[0] != 0  # how the front end next to the dead rank ends is SGLang's
    assert "DSPARK: node 1 (" in pair.leader.log_path.read_text()
