"""Tests of a sweep's servers, requests and their order, and of the CPU time that it records.

Only the server under test runs, and none is left behind.
"""

import subprocess
import sys
import time
from collections import Counter
from itertools import pairwise

import psutil
import pytest
from fake_server import SleepingServer
from serving.client import ReplyError
from serving.configurations import (
    Configuration,
    choose_baselines,
    parse_configuration,
)
from serving.counters import CpuTime
from serving.fleet import Fleet
from serving.prompts import Prompt, load_mixed_prompts, round_prompts
from serving.schedule import WARM_UP_ROUND, interleave, still_to_measure

from sglang_dspark.errors import ConfigError, LaunchError
from sglang_dspark.tools.launch import dspark_flags

PLAIN, STATIC, OTHER = (Configuration(label, "plain", "", "float32") for label in ("plain", "static", "other"))


def test_static_configuration_becomes_flags_and_a_policy():
    configuration = parse_configuration("static:3@float32 --speculative-dspark-block-size 5", "bfloat16")
    assert configuration.label == "static:3@float32 --speculative-dspark-block-size 5"
    assert configuration.verify_len == 3
    assert configuration.server_flags("DRAFT") == (
        *("--dtype", "float32", *dspark_flags("DRAFT")),
        *("--speculative-dspark-block-size", "5"),
    )
    assert configuration.policy_fields == {"policy": "static", "verify_len": 3}


def test_plain_configuration_needs_no_drafter_and_takes_the_default_dtype():
    configuration = parse_configuration("again=plain", "float16")
    assert configuration.label == "again"
    assert configuration.server_flags(None) == ("--dtype", "float16")
    assert configuration.verify_len is None


def test_baseline_is_the_plain_configuration_of_the_same_dtype():
    served = [
        ("a", "static", "float32"),
        ("b", "plain", "float32"),
        ("c", "auto", "bfloat16"),
        ("d", "off", "bfloat16"),
    ]
    assert choose_baselines(served) == {"a": "b", "b": "b", "c": "d", "d": "c"}


def test_speed_is_divided_by_off_for_what_speculates_and_by_plain_for_off():
    served = [
        ("auto", "auto", "float32"),
        ("plain", "plain", "float32"),
        ("off", "off", "float32"),
        ("other off", "off", "float32"),
        ("builtin", "builtin", "float32"),
        ("static16", "static", "bfloat16"),
        ("plain16", "plain", "bfloat16"),
    ]
    assert choose_baselines(served) == {
        "auto": "off",
        "plain": "plain",
        "off": "plain",
        "other off": "plain",
        "builtin": "plain",
        "static16": "plain16",  # nothing else is left without an off of its dtype
        "plain16": "plain16",
    }


def test_no_configuration_always_runs_at_one_position_or_after_the_same_one():
    configurations = [PLAIN, STATIC, OTHER]
    cells = [cell for cell in interleave(configurations, [1, 8], 30) if not cell.is_warm_up]
    assert cells == [cell for cell in interleave(configurations, [1, 8], 30) if not cell.is_warm_up]
    assert len(cells) == 3 * 2 * 30
    for users in (1, 8):
        seen = Counter((cell.configuration, cell.position) for cell in cells if cell.users == users)
        assert len(seen) == 9 and min(seen.values()) >= 4  # 10 in the mean; below 4 in one of 150 draws
    groups = [cells[start : start + 3] for start in range(0, len(cells), 3)]
    followers = Counter((a.configuration, b.configuration) for group in groups for a, b in pairwise(group))
    assert len(followers) == 6 and min(followers.values()) >= 8  # 20 in the mean


def test_cells_that_are_compared_run_in_a_row():
    cells = interleave([PLAIN, STATIC, OTHER], [1, 2], 2)
    groups = [cells[start : start + 3] for start in range(0, len(cells), 3)]
    for group in groups:
        assert len({(cell.users, cell.round) for cell in group}) == 1
        assert {cell.configuration for cell in group} == {PLAIN, STATIC, OTHER}
        assert [cell.position for cell in group] == [0, 1, 2]
    assert [(group[0].round, group[0].users) for group in groups] == [
        (index, users) for index in (WARM_UP_ROUND, 0, 1) for users in (1, 2)
    ]


def test_rounds_take_consecutive_prompts_and_start_over():
    prompts = [Prompt(index, str(index)) for index in range(5)]
    assert [p.index for p in round_prompts(prompts, 0, 3)] == [0, 1, 2]
    assert [p.index for p in round_prompts(prompts, 1, 3)] == [3, 4, 0]
    assert [p.index for p in round_prompts(prompts, WARM_UP_ROUND, 2)] == [3, 4]


def test_prompt_files_take_turns(tmp_path):
    for name, count in (("a", 3), ("b", 2)):
        lines = [f'{{"turns": ["{name}{index}"]}}' for index in range(count)]
        (tmp_path / name).write_text("\n".join(lines))
    mixed = load_mixed_prompts([tmp_path / "a", tmp_path / "b"])
    assert mixed == [Prompt(index, text) for index, text in enumerate(("a0", "b0", "a1", "b1"))]


def test_interrupted_sweep_measures_the_rest_after_its_warm_up():
    cells = interleave([PLAIN, STATIC], [1, 8], 2)
    done = {cell.key for cell in cells if cell.round == 0 or cell.users == 1 or cell.configuration == PLAIN}
    rest = still_to_measure(cells, done)
    assert [(c.configuration.label, c.users, c.round) for c in rest] == [
        ("static", 8, WARM_UP_ROUND),
        ("static", 8, 1),
    ]
    assert still_to_measure(cells, {cell.key for cell in cells}) == []


def test_sglangs_own_dspark_is_asked_for_without_ours():
    own = parse_configuration("builtin SGLANG_RAGGED_VERIFY_MODE=compact --a-flag 1", "bfloat16")
    flags = ("--dtype", "bfloat16", "--speculative-algorithm", "DSPARK", "--speculative-draft-model-path", "DRAFT")
    assert own.server_flags("DRAFT") == (*flags, "--a-flag", "1")
    assert own.environment == {"SGLANG_DSPARK_ENGINE": "builtin", "SGLANG_RAGGED_VERIFY_MODE": "compact"}
    assert parse_configuration("builtin", "bfloat16").environment["SGLANG_RAGGED_VERIFY_MODE"] == "static"
    given = parse_configuration("own=static:3 A_VARIABLE=1,2 OTHER= --flag A=B", "bfloat16")
    assert (given.environment, given.extra_flags) == ({"A_VARIABLE": "1,2", "OTHER": ""}, ("--flag", "A=B"))
    assert own.policy_fields is None and parse_configuration("auto", "bfloat16").environment == {}
    with pytest.raises(ConfigError, match="takes no argument"):
        parse_configuration("builtin:fast", "bfloat16")
    with pytest.raises(ConfigError, match="--draft"):
        own.server_flags(None)


class Watched(SleepingServer):
    @property
    def is_suspended(self):
        return psutil.Process(self.pid).status() == psutil.STATUS_STOPPED

    def becomes(self, suspended):
        """Signals take their time."""
        deadline = time.monotonic() + 60
        while self.is_suspended != suspended and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.is_suspended == suspended


@pytest.fixture
def servers():
    return {"a": Watched(), "b": Watched()}


def test_all_but_the_chosen_server_are_suspended(servers):
    started = []
    with Fleet(servers | {"again": servers["a"]}, started.append) as fleet:
        assert servers["a"].becomes(suspended=True) and servers["b"].becomes(suspended=True)
        with fleet.awake("b") as server:
            assert server is servers["b"]
            assert servers["a"].becomes(suspended=True) and servers["b"].becomes(suspended=False)
        assert servers["b"].becomes(suspended=True)
    assert started == ["a", "b"]
    assert servers["a"].ended_by_itself and servers["b"].ended_by_itself


class Unstartable(Watched):
    def __enter__(self):
        raise LaunchError("no room")


def test_a_server_that_does_not_start_leaves_no_other_behind():
    servers = {name: Unstartable() if name == "b" else Watched() for name in "abc"}
    with pytest.raises(LaunchError, match="no room"), Fleet(servers):
        pytest.fail("it started")
    assert [name for name, server in servers.items() if hasattr(server, "pid")] == ["a"]
    assert servers["a"].ended_by_itself


def test_servers_that_start_together_do_without_one_that_fails():
    servers = {name: Unstartable() if name in "bc" else Watched() for name in "abcd"}
    started = []
    with Fleet(servers | {"again": servers["b"]}, started.append, together=True) as fleet:
        assert fleet.failed.keys() == {"b", "c", "again"} and sorted(started) == [*"abcd"]
        with fleet.awake("d") as server:
            assert servers["a"].becomes(suspended=True) and server.becomes(suspended=False)
    assert servers["a"].ended_by_itself and servers["d"].ended_by_itself
    with pytest.raises(LaunchError, match="no room"), Fleet({"b": Unstartable()}, together=True):
        pytest.fail("none started")


def test_failed_request_shows_the_log_and_servers_are_stopped(servers):
    with pytest.raises(LaunchError, match=r"(?s)b: refused.*last words"), Fleet(servers) as fleet, fleet.awake("b"):
        raise ReplyError("refused")
    assert servers["a"].ended_by_itself and servers["b"].ended_by_itself


@pytest.mark.parametrize("is_server", [True, False])
def test_cpu_time_is_the_servers_or_that_of_others(is_server):
    """Of an idle process, whose start takes next to no time, and a busy one."""
    busy = [sys.executable, "-c", "while True: pass"]
    with subprocess.Popen(["sleep", "300"]) as idle, subprocess.Popen(busy) as other:
        try:
            server = other if is_server else idle
            before = CpuTime.read(server.pid)
            deadline, name = time.monotonic() + 60, "server_s" if is_server else "others_s"
            while getattr(used := CpuTime.read(server.pid) - before, name) < 0.2 and time.monotonic() < deadline:
                time.sleep(0.02)
        finally:
            idle.kill()
            other.kill()
    assert getattr(used, name) >= 0.2
    assert is_server or used.server_s < 0.2
