"""Bytes that a step moves for the states of hybrid targets: replayed rows against snapshots of every row's state."""

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "kernels"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("bench_gated_delta")


def test_replay_moves_less_than_a_third_of_what_snapshots_move(bench):
    """At eight rows, even if all are accepted."""
    for shape in bench.SHAPES.values():
        assert shape.replay_bytes(8, 8) < shape.snapshot_bytes(8) / 3


def test_the_bytes_are_those_of_the_published_sizes(bench):
    shape = bench.SHAPES["Qwen3.8-27B"]
    assert round(shape.layers * shape.state_bytes / 1e6) == 151
    eight_rows = shape.layers * 48 * 8
    assert round(eight_rows * shape.state_bytes / 1e9) == 58
    assert eight_rows * shape.replayed_bytes / 1e9 == pytest.approx(0.3, abs=0.01)
    state = shape.state_bytes
    assert shape.replay_bytes(0, 0) == 3 * state and shape.snapshot_bytes(8) - shape.snapshot_bytes(7) > state
