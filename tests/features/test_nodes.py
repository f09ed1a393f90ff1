"""Machines of one server: started alike, and none goes on without the others."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest
from sglang.srt.distributed.parallel_state import GroupCoordinator
from sglang_objects import partly, server_args
from torch import distributed

from sglang_dspark.config import DSparkConfig
from sglang_dspark.engine.server import DSparkServer
from sglang_dspark.errors import ConfigError
from sglang_dspark.features import nodes
from sglang_dspark.features.nodes import FEATURE, Nodes, check_alike, to_have_in_common, watch_nodes

TWO_BY_TWO = Nodes(["left", "left", "right", "right"], per_node=2)


def test_every_rank_of_another_machine_and_rank_zero_watch_each_other():
    watched = [TWO_BY_TWO.watched_by(rank) for rank in range(4)]
    assert watched == [[2, 3], [], [0], [0]]


def facts(**options):
    return to_have_in_common(DSparkServer(replace(DSparkConfig(), **options), drafter=None, dummy_draft=False))


def test_a_machine_that_was_started_otherwise_is_named():
    with pytest.raises(
        ConfigError, match=r"node 1 \(right\) has --speculative-dspark-block-size=3 and node 0 \(left\)"
    ):
        check_alike([facts(), facts(), facts(block_size=3), facts(block_size=3)], TWO_BY_TWO)


def test_machines_keep_their_files_where_they_like(tmp_path):
    """Rank 0's step times count; everybody reads the temperatures."""
    for name, content in {"a": "1", "b": "1", "c": "2"}.items():
        (tmp_path / name).write_text(content)
    here, there, other = (facts(confidence_sts_path=str(tmp_path / name)) for name in "abc")
    check_alike([facts(), facts(), facts(sps_table_path="/a"), facts()], TWO_BY_TWO)
    check_alike([here, here, there, there], TWO_BY_TWO)
    for wrong in (other, facts()):
        with pytest.raises(ConfigError, match=r"--speculative-dspark-confidence-sts-path=.*; start all nodes alike"):
            check_alike([here, here, wrong, wrong], TWO_BY_TWO)


def test_one_machine_exchanges_nothing():
    assert [FEATURE.is_used(server_args(nnodes=nodes)) for nodes in (1, 2)] == [False, True]


@pytest.fixture(autouse=True)
def long_moment(monkeypatch):
    """Processes that are forked from this one have time, however slow the machine is."""
    monkeypatch.setattr(nodes, "GRACE_S", 600.0)


def serve(rank: int, told: dict[str, object], folder) -> None:
    """A process in place of a scheduler, in a group of four on two machines. It ends with status 3 when told to."""
    logging.basicConfig(filename=folder / f"{rank}.log", force=True)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # what other tests import may have put a handler there
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=4)

    def gathered(value):
        values = [None] * 4
        distributed.all_gather_object(values, value)
        return values

    group = partly(GroupCoordinator, ranks=[0, 1, 2, 3], rank_in_group=rank, all_gather_object=gathered)
    try:
        watch_nodes(group, 2, told, end=lambda: os._exit(3))
    except ConfigError as error:
        (folder / f"{rank}.log").write_text(str(error))
        os._exit(4)
    (folder / f"{rank}.serves").touch()
    signal.pause()


@contextmanager
def started(folder, told):
    """Four such processes, by rank."""
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=serve, args=(rank, told[rank], folder)) for rank in range(4)]
    for process in ranks:
        process.start()
    try:
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.join()


def wait_until(condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(("victim", "log", "named"), [(3, 0, "node 1"), (0, 2, "node 0")])
def test_the_end_of_a_machine_ends_the_others(tmp_path, victim, log, named, monkeypatch):
    monkeypatch.setattr(nodes, "GRACE_S", 0.0)
    with started(tmp_path, [{}] * 4) as ranks:
        wait_until(lambda: len(list(tmp_path.glob("*.serves"))) == 4)
        assert all(process.is_alive() for process in ranks)
        ranks[victim].kill()
        ranks[log].join(120)
        assert ranks[log].exitcode == 3
        assert ranks[1].is_alive()  # next to rank 0 SGLang's own front end watches
    told = (tmp_path / f"{log}.log").read_text()
    assert f"DSPARK: {named} (" in told and f"its rank {victim} has closed the connection" in told


def test_a_server_that_shuts_down_is_left_to_it(tmp_path):
    """Its ranks end within a moment of each other: the last one is not killed for it."""
    with started(tmp_path, [{}] * 4) as ranks:
        wait_until(lambda: len(list(tmp_path.glob("*.serves"))) == 4)
        ranks[0].terminate()
        wait_until((tmp_path / "2.log").read_text)
        ranks[2].terminate()
        ranks[2].join(120)
        assert ranks[2].exitcode == -signal.SIGTERM


def test_every_machine_says_what_differs(tmp_path):
    with started(tmp_path, [facts(), facts(), facts(), facts(schedule="static")]) as ranks:
        wait_until(lambda: any(tmp_path.glob("*.serves")) or not any(process.is_alive() for process in ranks))
        assert [process.exitcode for process in ranks] == [4] * 4
    for rank in range(4):
        assert "--speculative-dspark-schedule=static" in (tmp_path / f"{rank}.log").read_text()
