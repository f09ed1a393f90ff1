"""A server keeps its step times, and starts if it cannot."""

import errno
import logging
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang_objects import ONE_RANK, model_config, partly, worker
from transformers import PretrainedConfig

from sglang_dspark.config import DSparkConfig
from sglang_dspark.engine import measure_steps
from sglang_dspark.engine.agreement import Agreement
from sglang_dspark.engine.measure_steps import Stepper
from sglang_dspark.errors import ConfigError
from sglang_dspark.scheduling.sps_table import SpsTable
from sglang_dspark.worker.buffers import Tiers, at_least
from sglang_dspark.worker.eager import EagerExecutor
from sglang_dspark.worker.graphs import ExecutorSelector
from sglang_dspark.worker.warm_up import MeasuredSteps

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


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_a_file_that_cannot_be_used_is_measured_anew_or_ends_the_start(tmp_path, caplog, spoil):
    path = tmp_path / "table.json"
    assert measure_steps._load(path, KEY, named=True) is None
    table().save(path)
    assert (
        measure_steps._load(path, KEY, named=False) is not None
        and measure_steps._load(path, KEY, named=True) is not None
    )
    spoil(path)
    with pytest.raises(ConfigError, match=r"--speculative-dspark-sps-table-path='.*table.json'.*or name another one"):
        measure_steps._load(path, KEY, named=True)
    with caplog.at_level(logging.WARNING):
        assert measure_steps._load(path, KEY, named=False) is None
    assert "step times are measured again" in caplog.text
    assert str(path) in caplog.text
    # And what is measured takes its place.
    measure_steps._save(table(), path, named=False)
    assert measure_steps._load(path, KEY, named=False) is not None


@pytest.mark.parametrize(
    ("options", "max_verify", "measured"),
    [
        ({"schedule": "auto"}, 2, True),
        ({"schedule": "static"}, 2, False),
        ({"schedule": "static", "max_gap_ms": 50.0}, 2, True),
        ({"schedule": "off", "max_gap_ms": 50.0}, 0, False),
    ],
)
def test_step_times_are_measured_for_policies_and_bounds_that_need_them(
    options, max_verify, measured, tmp_path, monkeypatch
):
    monkeypatch.setattr(measure_steps, "measure_steps", lambda stepper, key: table())
    stepper = partly(Stepper, agreement=Agreement(ONE_RANK), max_verify=max_verify)
    config = DSparkConfig(sps_table_path=str(tmp_path / "table.json"), **options)
    assert (measure_steps._load_or_measure(stepper, config, KEY) is not None) == measured


def test_a_user_without_a_home_has_no_cache(monkeypatch, caplog):
    """Some containers are like that."""
    monkeypatch.setattr(Path, "expanduser", lambda path: (_ for _ in ()).throw(RuntimeError("no home")))
    with caplog.at_level(logging.WARNING):
        assert measure_steps._place_in_cache(KEY) is None
    assert "step times are not kept" in caplog.text
    assert measure_steps._load(None, KEY, named=False) is None
    measure_steps._save(table(), None, named=False)


def test_drafts_are_timed_where_they_are_served(monkeypatch):
    """A budget fits into graphs where a whole block of every request does not: 129 blocks of 8 are 1032 rows."""
    tiers, chosen = Tiers.of([1, 64, 128, 160, 256], 7), []

    def select(step, decision):
        rows = at_least(tiers.tokens, len(step) + decision.max_drafts(len(step)))
        chosen.append((decision.draft_lens(len(step)), rows is not None))
        return partly(EagerExecutor, stage=lambda step, decision: None, draft=lambda step, decision: None)

    steps = MeasuredSteps.__new__(MeasuredSteps)
    steps._executors = partly(ExecutorSelector, select=select)
    for requests in (1, 128, 129, 256):
        steps._step = range(requests)
        steps.draft(7)
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


def test_a_full_disk_leaves_the_table_before(tmp_path, monkeypatch, caplog):
    path = tmp_path / "table.json"
    table().save(path)
    before = path.read_bytes()
    monkeypatch.setattr(os, "fsync", full_disk)
    with caplog.at_level(logging.WARNING):
        measure_steps._save(table(), path, named=False)
    assert "cannot be kept" in caplog.text
    assert "No space left on device" in caplog.text
    assert [*tmp_path.iterdir()] == [path]
    assert path.read_bytes() == before
    with pytest.raises(
        ConfigError, match=r"--speculative-dspark-sps-table-path='.*table.json' cannot be written: No sp"
    ):
        measure_steps._save(table(), path, named=True)


def full_disk(descriptor):
    raise OSError(errno.ENOSPC, "No space left on device")
