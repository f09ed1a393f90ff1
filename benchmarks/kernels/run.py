"""Time of every kernel on an NVIDIA GPU, against its torch form and against what the device needs at least.

    python benchmarks/kernels/run.py --output RESULTS/kernels.json
    python benchmarks/kernels/run.py --output RESULTS/kernels.json --quick --only planning,training

Kernels run back to back in a CUDA graph, as they do in a server; torch forms run eagerly, launches included. `floor` is
the time to move the bytes at the speed of a large copy, or to do the arithmetic at the speed of a large matrix product;
`empty` is what a kernel costs that does nothing. A working set that fits the L2 cache stays there between runs, so its
ratio to the floor can be below 1. What fails is recorded and stops no other case.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
from harness import Case, all_cases
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch.utils.benchmark import Timer
from triton.testing import do_bench_cudagraph

from sglang_dspark.tools import provenance

_COPY_BYTES = 2 << 30  # many times the L2 of any GPU
_MATMUL_SIDE = 8192


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

    @classmethod
    def measured(cls) -> Floors:
        """Measure the device once."""
        source, target = (torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
        a, b = (torch.randn(_MATMUL_SIDE, _MATMUL_SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        return cls(
            copy_gb_per_s=2 * _COPY_BYTES / eager_us(lambda: target.copy_(source)) / 1e3,
            bf16_tflop_per_s=2 * _MATMUL_SIDE**3 / eager_us(lambda: torch.mm(a, b)) / 1e6,
            l2_bytes=torch.cuda.get_device_properties(0).L2_cache_size,
            empty_us=1e3 * do_bench_cudagraph(torch.zeros(1, device="cuda").zero_, return_mode="median"),
        )

    def floor_us(self, bytes_moved: int, flops: int) -> float:
        """Return the microseconds that moving the bytes or doing the arithmetic takes, whichever is longer."""
        return max(bytes_moved / (self.copy_gb_per_s * 1e3), flops / (self.bf16_tflop_per_s * 1e6))


def eager_us(run: Callable[[], object]) -> float:
    """Return the median microseconds of a run, what the host needs to launch it included."""
    return 1e6 * float(Timer("run()", globals={"run": run}).blocked_autorange(min_run_time=0.05).median)


def measure(cases: Iterable[Case], floors: Floors, rep_ms: int, capability: int) -> Iterator[dict[str, Any]]:
    """Yield the record of each case that the device can run; that of a case that fails says why."""
    for case in cases:
        if case.capability <= capability:
            record = {"case": case.name, "shape": case.shape}
            try:
                yield record | _measured(case, floors, rep_ms)
            except Exception as error:  # noqa: BLE001 - whatever a case does wrong, the others are measured
                yield record | {"error": f"{type(error).__name__}: {str(error).strip()[-2000:]}"}


def _measured(case: Case, floors: Floors, rep_ms: int) -> dict[str, Any]:
    p10, median, p90 = do_bench_cudagraph(case.run, rep=rep_ms, quantiles=[0.1, 0.5, 0.9])
    floor_us = floors.floor_us(case.bytes_moved, case.flops)
    return {
        "median_us": 1e3 * median,
        "p10_us": 1e3 * p10,
        "p90_us": 1e3 * p90,
        "reference_us": eager_us(case.reference),
        "bytes_moved": case.bytes_moved,
        "flops": case.flops,
        "floor_us": floor_us,
        "ratio": 1e3 * median / floor_us,
        "fits_l2": case.bytes_moved < floors.l2_bytes,
    }


def result_table(records: list[dict[str, Any]]) -> Table:
    """Return the records for the terminal."""
    table = Table(title="microseconds")
    for name in ("case", "shape"):
        table.add_column(name, overflow="fold")
    for name in ("median", "p10", "p90", "torch", "floor", "ratio"):
        table.add_column(name, justify="right")
    table.add_column("note", overflow="fold")
    for record in records:
        shape = " ".join(f"{key}={value}" for key, value in record["shape"].items())
        if "error" in record:
            table.add_row(record["case"], shape, *[""] * 6, f"[red]{escape(record['error'].splitlines()[0])}[/red]")
            continue
        times = (record[key] for key in ("median_us", "p10_us", "p90_us", "reference_us", "floor_us", "ratio"))
        note = "fits L2" if record["fits_l2"] else ""
        table.add_row(record["case"], shape, *(f"{time:.2f}" for time in times), note)
    return table


@click.command(help=__doc__)
@click.option("--output", type=click.Path(path_type=Path), required=True, help="JSON file to write.")
@click.option("--quick", is_flag=True, help="A tenth of the time for every case.")
@click.option("--only", default="", help="Folders of kernels, separated by commas; all by default.")
def main(output: Path, quick: bool, only: str) -> None:
    """Command line; see the module."""
    if not torch.cuda.is_available():
        raise click.ClickException("kernels are timed on an NVIDIA GPU, and PyTorch sees none on this machine")
    major, minor = torch.cuda.get_device_capability()
    console, floors = Console(), Floors.measured()
    console.print(
        f"{provenance.gpu()}: copy {floors.copy_gb_per_s:.0f} GB/s, bf16 {floors.bf16_tflop_per_s:.0f} TFLOP/s, "
        f"empty kernel {floors.empty_us:.2f} us"
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    document = {**provenance.record(), "floors": asdict(floors), "cases": (records := [])}
    with torch.inference_mode():
        cases = all_cases(torch.device("cuda"), only)
        for record in measure(cases, floors, 2 if quick else 20, 10 * major + minor):
            records.append(record)
            provenance.write_json(output, document)
    console.print(result_table(records))
    if any("error" in record for record in records):
        sys.exit(1)


if __name__ == "__main__":
    main()
