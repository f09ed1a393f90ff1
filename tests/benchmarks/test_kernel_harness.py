"""The kernel benchmarks: what fails is recorded and stops nothing else; without a GPU they say so."""

import importlib.util
import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "kernels"
FLOORS = {"copy_gb_per_s": 4000.0, "bf16_tflop_per_s": 800.0, "l2_bytes": 1000, "empty_us": 2.0}

BROKEN_CASES = """
from harness import Case

def fail():
    raise ValueError("no such shape")

def cases(device):
    return [Case("first", {"bs": 1}, fail, None, 8, 0), Case("second", {"bs": 2}, fail, None, 8, 0)]
"""


@pytest.fixture
def harness(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("harness")


def test_the_floor_is_the_longer_of_moving_and_computing(harness):
    floors = harness.Floors(**FLOORS)
    assert floors.floor_us(4_000_000, 0) == pytest.approx(1.0)
    assert floors.floor_us(4_000_000, 8_000_000_000) == pytest.approx(10.0)


def test_every_failure_is_recorded(harness, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "bench_broken_cases.py").write_text(BROKEN_CASES)
    output = tmp_path / "records.jsonl"
    for module in ("bench_missing_module", "bench_broken_cases"):
        harness.measure_module(module, FLOORS, 3, output)
    missing, *cases = [json.loads(line) for line in output.read_text().splitlines()]
    assert missing["module"] == "bench_missing_module" and "ModuleNotFoundError" in missing["error"]
    assert [(case["case"], case["error"]) for case in cases] == [
        ("first", "ValueError: no such shape"),
        ("second", "ValueError: no such shape"),
    ]
