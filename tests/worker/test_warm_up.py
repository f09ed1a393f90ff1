"""Tests of start-up: the table of step times, the largest step, and the kernels that are compiled.

A server starts even if it cannot keep its table.
"""

import errno
import logging
import os
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton
from dspark_kernels import is_crowded, num_splits
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.runtime_context import get_parallel
from sglang_objects import ONE_RANK, model_config, partly, runner, server_args, worker
from sglang_objects import table as request_table
from sglang_objects import worker as target_worker
from stage_loop import StageLoop
from transformers import PretrainedConfig

from sglang_dspark.config import DSparkConfig
from sglang_dspark.engine import measure_steps
from sglang_dspark.engine.agreement import Agreement
from sglang_dspark.engine.measure_steps import DummyBatch, Stepper, load_or_measure
from sglang_dspark.engine.part import LogitsPart
from sglang_dspark.errors import ConfigError
from sglang_dspark.scheduling.sps_table import SpsTable
from sglang_dspark.step.state import TargetOutput
from sglang_dspark.worker.buffers import Tiers, at_least
from sglang_dspark.worker.warm_up import (
    MeasuredSteps,
    hold_largest_step,
    of_every_attention,
    on_stream_of_steps,
    report_late_kernels,
    widths,
)

KEY = {"device": "cpu", "max_verify": "2"}


def table(drafts=3, **key):
    times = np.full((1, drafts, 1), 2.0)
    return SpsTable({**KEY, **key}, [1], range(drafts), [64], times, times)


SPOILT = {
    "empty": lambda path: path.write_text(""),
    "torn": lambda path: path.write_text(path.read_text()[:100]),
    "binary": lambda path: path.write_bytes(b"\xff\xfe\x00"),
    "of another version": lambda path: path.write_text(path.read_text().replace('"version": ', '"version": 9')),
    "negative": lambda path: path.write_text(path.read_text().replace("2.0", "-2.0")),
    "of another device": lambda path: table(device="gpu").save(path),
    "of other drafts": lambda path: table(drafts=6).save(path),
}


@pytest.fixture
def stepped(monkeypatch, tmp_path):
    """The table of a server by its options: measured if need be, in a home of its own."""
    monkeypatch.setenv("HOME", str(tmp_path))

    def stepped(max_verify=2, **options):
        target = target_worker()
        target.server_args = server_args()
        measured = []
        monkeypatch.setattr(measure_steps, "measure_steps", lambda stepper, key: measured.append(key) or table())
        stepper = Stepper(target, Agreement(ONE_RANK), max_verify, of=None)
        with get_parallel().override(dp_rank=None):
            found = load_or_measure(stepper, DSparkConfig(**options), KEY)
        return found is not None, bool(measured)

    return stepped


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_a_file_that_cannot_be_used_is_measured_anew_or_ends_the_start(tmp_path, caplog, spoil, stepped):
    path = tmp_path / "table.json"
    named = {"sps_table_path": str(path)}
    assert [stepped(**named) for _ in range(2)] == [(True, True), (True, False)]
    spoil(path)
    with pytest.raises(ConfigError, match=r"--speculative-dspark-sps-table-path='.*table.json'.*or name another one"):
        stepped(**named)
    assert [stepped() for _ in range(2)] == [(True, True), (True, False)]
    [cached] = (tmp_path / ".cache").rglob("*.json")
    spoil(cached)
    with caplog.at_level(logging.WARNING):
        assert [stepped() for _ in range(2)] == [(True, True), (True, False)]
    assert "step times are measured again" in caplog.text
    assert str(cached) in caplog.text


@pytest.mark.parametrize(
    ("options", "max_verify", "measured"),
    [
        ({"schedule": "auto"}, 2, True),
        ({"schedule": "static"}, 2, False),
        ({"schedule": "static", "max_gap_ms": 50.0}, 2, True),
        ({"schedule": "off", "max_gap_ms": 50.0}, 0, False),
    ],
)
def test_step_times_are_measured_for_policies_and_bounds_that_need_them(options, max_verify, measured, stepped):
    assert stepped(max_verify, **options) == (measured, measured)


def test_a_user_without_a_home_has_no_cache(monkeypatch, caplog, stepped):
    """Some containers are like that."""
    monkeypatch.setattr(Path, "expanduser", lambda path: (_ for _ in ()).throw(RuntimeError("no home")))
    with caplog.at_level(logging.WARNING):
        assert [stepped() for _ in range(2)] == [(True, True)] * 2
    assert "step times are not kept" in caplog.text


def test_drafts_are_timed_where_they_are_served():
    """A budget fits into graphs where a whole block of every request does not: 129 blocks of 8 are 1032 rows."""
    tiers, chosen = Tiers.of([1, 64, 128, 160, 256], 7), []

    class Executors:
        """Notes what is drafted, and whether it fits into graphs."""

        def select(self, step, decision):
            rows = at_least(tiers.tokens, len(step) + decision.max_drafts(len(step)))
            chosen.append((decision.draft_lens(len(step)), rows is not None))
            return SimpleNamespace(stage=lambda *step: None, draft=lambda *step: None)

    for requests in (1, 128, 129, 256):
        with DummyBatch(largest_worker(requests), requests, 1, 8) as dummy:
            MeasuredSteps(Executors(), dummy, 7).draft(7)
        assert chosen.pop() == ([7] * requests, True)


@pytest.fixture
def key_of(monkeypatch, tmp_path):
    """The key of a server's table, by its flags and the configuration of its target."""
    monkeypatch.setattr(measure_steps, "most_requests", lambda runner: 4)

    def key(config=None, **flags):
        target = model_config(quantization=None, hf_config=PretrainedConfig(**config or {}))
        measured = worker(dtype=torch.float32, kv_cache_dtype=torch.float32, model_config=target)
        measured.device = "cpu"
        given = dict.fromkeys(measure_steps._TIMED_ARGUMENTS) | {"model_path": "owner/target"} | flags
        shape = {"draft_path": str(tmp_path), "block_size": 7, "max_verify": 7, "cuda_graphs": "none"}
        return measure_steps.table_key(measured, SimpleNamespace(**given), **shape)

    return key


@pytest.mark.parametrize("field", ["tp_size", "nnodes", "moe_runner_backend", "cpu_offload_gb", "enable_symm_mem"])
def test_step_times_are_those_of_their_flags(field, key_of):
    assert key_of(**{field: 1}) == key_of(**{field: 1}) != key_of(**{field: 2})


def test_step_times_are_those_of_the_target_as_it_is_served(key_of):
    """Whatever its name is, and whatever overrides change of its configuration."""
    config = {"num_hidden_layers": 4, "dtype": torch.bfloat16}
    elsewhere = {"_name_or_path": "/other/target", "transformers_version": "5.0", "context_len": 4096}
    assert key_of(config) == key_of(config | elsewhere) != key_of(config | {"num_hidden_layers": 2})
    assert key_of(config) == key_of(config, model_path="/other/target") != key_of(config, model_path="owner/other")


def test_a_full_disk_leaves_the_table_before(tmp_path, monkeypatch, caplog, stepped):
    assert stepped() == (True, True)
    [path] = (tmp_path / ".cache").rglob("*.json")
    table(device="gpu").save(path)
    before = path.read_bytes()
    monkeypatch.setattr(os, "fsync", full_disk)
    with caplog.at_level(logging.WARNING):
        assert stepped() == (True, True)
    assert "cannot be kept" in caplog.text
    assert "No space left on device" in caplog.text
    assert [*path.parent.iterdir()] == [path]
    assert path.read_bytes() == before
    with pytest.raises(
        ConfigError, match=r"--speculative-dspark-sps-table-path='.*table.json' cannot be written: No sp"
    ):
        stepped(sps_table_path=str(tmp_path / "table.json"))


def full_disk(descriptor):
    raise OSError(errno.ENOSPC, "No space left on device")


REQUESTS, SLOTS, VOCAB_SIZE = 5, 40, 256


class Target:
    """Verifies nothing, but has logits of a row as a target has."""

    def __init__(self, loop, error=None):
        self.rows, self._error = [], error
        self._vocab_size, self._width = loop.drafter.config.vocab_size, loop.drafter.model.fc.in_features
        loop.drafter.allocate(SLOTS + 1, torch.float32)
        loop.eager.forward = self._verify

    def _verify(self, step, plan):
        if self._error is not None:
            raise self._error
        rows = len(plan.input_ids)
        self.rows.append((len(step), rows, step.rows.any_greedy))
        logits = torch.zeros(rows, self._vocab_size)
        return TargetOutput(LogitsProcessorOutput(next_token_logits=logits), torch.zeros(rows, self._width))


def largest_worker(requests=REQUESTS):
    return target_worker(
        max_running_requests=requests,
        req_to_token_pool=request_table(requests, 32),
        token_to_kv_pool=partly(MHATokenToKVPool, size=SLOTS),
        device="cpu",
        model_config=model_config(vocab_size=VOCAB_SIZE),
        spec_algorithm=None,
    )


def test_every_request_is_sampled_and_has_all_drafts():
    loop, table = StageLoop(schedule="static"), largest_worker()
    target = Target(loop)
    hold_largest_step(loop.eager, table, loop.gamma)
    assert target.rows == [(REQUESTS, REQUESTS * (loop.gamma + 1), False)]
    assert not table.model_runner.req_to_token_pool.req_to_token.any()


def test_what_features_hold_lies_next_to_the_step():
    """Or the step would take memory that the allocator has not handed out yet."""
    loop, seen = StageLoop(schedule="static"), []
    target = Target(loop)

    class Holding(LogitsPart):
        @contextmanager
        def held(self, requests):
            seen.append((requests, len(target.rows)))
            yield
            seen.append((requests, len(target.rows)))

    hold_largest_step(loop.eager, largest_worker(), loop.gamma, [Holding(), LogitsPart()])
    assert seen == [(REQUESTS, 0), (REQUESTS, 1)]


def test_memory_that_is_not_there_ends_the_start():
    loop = StageLoop(schedule="static")
    Target(loop, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.2 GiB"))
    with pytest.raises(ConfigError, match=r"--max-running-requests=5 sampled requests with 7 drafts.*--mem-fraction"):
        hold_largest_step(loop.eager, largest_worker(), loop.gamma)


@pytest.mark.parametrize("overlap", [True, False])
def test_memory_is_held_for_the_stream_of_steps(monkeypatch, overlap):
    """Memory that is given back on one stream is handed out on no other by torch's allocator."""
    done = []

    @contextmanager
    def stream(chosen):
        done.append(chosen)
        yield
        done.append("left")

    device = SimpleNamespace(synchronize=lambda: done.append("waited"), stream=stream)
    monkeypatch.setattr(torch, "get_device_module", lambda name: device)
    with on_stream_of_steps(runner(device="cuda", forward_stream="forward"), overlap=overlap):
        done.append("step")
    assert done == ["waited", "forward" if overlap else None, "step", "left", "waited"]


def test_kernels_of_ours_are_reported(caplog, monkeypatch):
    hook = triton.knobs.runtime.kernel_load_end_hook
    monkeypatch.setattr(hook, "calls", [])
    report_late_kernels()
    report_late_kernels()
    with caplog.at_level(logging.WARNING):
        hook(None, None, "_plan_kernel", {}, "0123456789abcdef")
        hook(None, None, "somebody_elses_kernel", {}, "0123456789abcdef")
    [record] = caplog.records
    assert "_plan_kernel" in record.getMessage()


@pytest.mark.parametrize(("most", "expected"), [(0, []), (1, [1]), (4, [1, 3, 4]), (7, [1, 3, 7]), (8, [1, 3, 7, 8])])
def test_widths_reach_every_window(most, expected):
    """A window is an anchor and its drafts."""
    assert widths(most) == expected


@pytest.mark.parametrize("processors", [132, 148])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("most", [1, 64, 133, 256, 512])
def test_attention_is_compiled_in_every_form(most, kv_heads, processors):
    """With one K/V head per rank, contexts are split up to 132 requests, whose windows have more rows than graphs."""

    def forms(requests):
        batches = ((num, kv_heads, processors) for num in requests)
        return {(num_splits(*batch) == 1, is_crowded(*batch)) for batch in batches}

    compiled = of_every_attention(most, kv_heads, processors)
    assert forms(compiled) == forms(range(1, most + 1))
    assert max(compiled) <= most
