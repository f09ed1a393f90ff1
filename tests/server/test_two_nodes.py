"""One server on two machines: the texts are the target's, and neither machine goes on without the other.

The machines are two processes here that share no memory, and talk over the loopback device.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
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
    greedy,
    output_ids,
    policy,
    sitecustomized,
    wait_for_running,
)

from sglang_dspark.tools.launch import CPU_ENV, CPU_FLAGS, LaunchedServer, free_port

pytestmark = pytest.mark.thorough

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
    assert statuses[0] != 0  # how the front end beside the dead rank ends is SGLang's
    assert "DSPARK: node 1 (" in pair.leader.log_path.read_text()
