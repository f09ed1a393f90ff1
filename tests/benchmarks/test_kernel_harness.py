"""The kernel benchmarks: what fails is recorded and stops nothing else."""

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "kernels"


@pytest.fixture
def run(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("run")


@pytest.fixture
def floors(run):
    return run.Floors(copy_gb_per_s=4000.0, bf16_tflop_per_s=800.0, l2_bytes=1000, empty_us=2.0)


def test_the_floor_is_the_longer_of_moving_and_computing(floors):
    assert floors.floor_us(4_000_000, 0) == pytest.approx(1.0)
    assert floors.floor_us(4_000_000, 8_000_000_000) == pytest.approx(10.0)


def test_every_failure_is_recorded(run, floors, monkeypatch):
    def fail():
        raise ValueError("no such shape")

    monkeypatch.setattr(run, "do_bench_cudagraph", lambda form, **how: form())
    cases = [run.Case(name, {}, fail, fail, 8, capability=level) for name, level in (("a", 80), ("b", 80), ("c", 89))]
    found = [(record["case"], record["error"]) for record in run.measure(cases, floors, 1, capability=80)]
    assert found == [("a", "ValueError: no such shape"), ("b", "ValueError: no such shape")]
