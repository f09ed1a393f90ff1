"""Timing of GPU kernels against the time that the device needs at least.

A module ``bench_<kernel>.py`` beside this file states its cases with ``cases(device) -> list[Case]``; ``run.py``
collects and times them.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

_COPY_BYTES = 2 << 30  # many times the L2 of any GPU
_MATMUL_SIDE = 8192
_BATCH_US = 400.0  # a graph holds as many runs as take about this long, so that launching it costs little of it
_MAX_RUNS_PER_GRAPH = 64
_WARM_UP_RUNS = 5


@dataclass(frozen=True)
class Case:
    """A kernel at one size.

    Attributes:
        name: what runs, e.g. ``kv_inject``; the same at all sizes.
        shape: sizes by letter, e.g. ``{"bs": 64, "gamma": 7}``.
        run: one launch on the current stream, without a host sync. May be called any number of times.
        reference: the torch form of the same, timed eagerly; None if there is none.
        bytes_moved: what has to be read and written at least, each byte once.
        flops: matrix arithmetic; 0 if memory decides.
        capability: compute capability that it needs, e.g. 89.
    """

    name: str
    shape: dict[str, int]
    run: Callable[[], object]
    reference: Callable[[], object] | None
    bytes_moved: int
    flops: int
    capability: int = 80


@dataclass(frozen=True)
class Floors:
    """The best rates of the device, measured here.

    Attributes:
        copy_gb_per_s: bytes read and written by a large device-to-device copy.
        bf16_tflop_per_s: a large bf16 matrix product on random data.
        l2_bytes: size of the L2 cache; a working set below it is not read from memory again in repeated runs.
        empty_us: one kernel that does next to nothing, timed like the cases.
    """

    copy_gb_per_s: float
    bf16_tflop_per_s: float
    l2_bytes: int
    empty_us: float

    def floor_us(self, bytes_moved: int, flops: int) -> float:
        """Microseconds that moving the bytes or doing the arithmetic takes, whichever is longer."""
        return max(bytes_moved / (self.copy_gb_per_s * 1e3), flops / (self.bf16_tflop_per_s * 1e6))


@dataclass(frozen=True)
class Timing:
    """Microseconds of one run, over many samples; ``note`` says what was not as planned."""

    median_us: float
    p10_us: float
    p90_us: float
    samples: int
    note: str = ""


def bench_modules(only: str) -> list[str]:
    """Modules with cases: those that ``only`` names, without bench_ and separated by commas, or all of them.

    Raises:
        ClickException: there is no module of such a name.
    """
    modules = sorted(path.stem for path in Path(__file__).parent.glob("bench_*.py"))
    if not only:
        return modules
    wanted = [f"bench_{name.strip()}" for name in only.split(",")]
    if unknown := sorted(set(wanted) - set(modules)):
        raise click.ClickException(f"--only names {', '.join(unknown)}; there are {', '.join(modules)}")
    return wanted


def measure_floors(num_samples: int) -> Floors:
    """Measure the device once."""
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = time_eagerly(lambda: target.copy_(source), num_samples)
    a, b = (torch.randn(_MATMUL_SIDE, _MATMUL_SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    matmul = time_eagerly(lambda: torch.mm(a, b), num_samples)
    one = torch.zeros(1, device="cuda")
    return Floors(
        copy_gb_per_s=2 * _COPY_BYTES / copy.median_us / 1e3,
        bf16_tflop_per_s=2 * _MATMUL_SIDE**3 / matmul.median_us / 1e6,
        l2_bytes=torch.cuda.get_device_properties(0).L2_cache_size,
        empty_us=time_captured(one.zero_, num_samples).median_us,
    )


def time_eagerly(run: Callable[[], object], num_samples: int, note: str = "") -> Timing:
    """Time runs one by one as the stream takes them, what the host needs to launch them included."""
    for _ in range(_WARM_UP_RUNS):
        run()
    return _timing(_sample(run, num_samples), note)


def time_captured(run: Callable[[], object], num_samples: int) -> Timing:
    """Time runs back to back in a CUDA graph; eagerly if they cannot be captured."""
    for _ in range(_WARM_UP_RUNS):
        run()
    torch.cuda.synchronize()
    try:
        single_us = float(np.median(_sample(_capture(run, 1).replay, 5)))
        runs = max(1, min(_MAX_RUNS_PER_GRAPH, round(_BATCH_US / max(single_us, 1.0))))
        graph = _capture(run, runs)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return time_eagerly(run, num_samples, note=f"not captured: {reason}")
    for _ in range(_WARM_UP_RUNS):
        graph.replay()
    return _timing([sample / runs for sample in _sample(graph.replay, num_samples)], "")


def _capture(run: Callable[[], object], runs: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(runs):
            run()
    return graph


def _sample(run: Callable[[], object], num_samples: int) -> list[float]:
    """Microseconds of each run."""
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(num_samples)]
    torch.cuda.synchronize()
    for start, end in events:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in events]


def _timing(samples: list[float], note: str) -> Timing:
    p10, median, p90 = np.percentile(samples, [10, 50, 90]).tolist()
    return Timing(median_us=median, p10_us=p10, p90_us=p90, samples=len(samples), note=note)


def measure_case(case: Case, floors: Floors, num_samples: int) -> dict[str, Any]:
    """The record of one case."""
    timing = time_captured(case.run, num_samples)
    reference = None if case.reference is None else time_eagerly(case.reference, max(5, num_samples // 10))
    floor = floors.floor_us(case.bytes_moved, case.flops)
    return {
        "case": case.name,
        "shape": case.shape,
        **asdict(timing),
        "reference_us": None if reference is None else reference.median_us,
        "bytes_moved": case.bytes_moved,
        "flops": case.flops,
        "floor_us": floor,
        "ratio": timing.median_us / floor if floor > 0 else None,
        "fits_l2": case.bytes_moved < floors.l2_bytes,
    }


def _capability() -> int:
    """Compute capability of the GPU, 90 for 9.0."""
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def measure_module(module: str, floors: dict[str, Any] | None, num_samples: int, output: Path) -> None:
    """Body of one process: append the records of a module to ``output``, one JSON object per line.

    Without ``floors`` the device itself is measured and is the only record. A case that fails is a record with
    ``error``; one that takes the CUDA context down fails the cases after it in its module, but no other module.
    """
    with torch.inference_mode(), output.open("a", encoding="utf-8") as lines:

        def record(entry: dict[str, Any]) -> None:
            lines.write(json.dumps(entry) + "\n")
            lines.flush()
            os.fsync(lines.fileno())

        if floors is None:
            record(asdict(measure_floors(num_samples)))
            return
        try:
            cases = importlib.import_module(module).cases(torch.device("cuda"))
        except Exception as error:  # noqa: BLE001 - whatever a module does wrong, the others are measured
            record({"module": module, "error": _describe(error)})
            return
        for case in cases:
            if torch.cuda.is_available() and case.capability > _capability():
                continue
            try:
                entry = measure_case(case, Floors(**floors), num_samples)
            except Exception as error:  # noqa: BLE001 - likewise, case by case
                entry = {"case": case.name, "shape": case.shape, "error": _describe(error)}
            record({"module": module, **entry})


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()[-2000:]}"
