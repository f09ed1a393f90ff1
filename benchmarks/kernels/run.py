"""Time of every kernel on an NVIDIA GPU, against its torch form and against what the device needs at least.

    python benchmarks/kernels/run.py --output RESULTS/kernels.json
    python benchmarks/kernels/run.py --output RESULTS/kernels.json --quick --only plan,prepare

Kernels run back to back in a CUDA graph, as they do in a server; torch forms run eagerly, launches included. `floor` is
the time to move the bytes at the speed of a large copy, or to do the arithmetic at the speed of a large matrix product;
`empty` is what a kernel costs that does nothing. A working set that fits the L2 cache stays there between runs, so its
ratio to the floor can be below 1. Every module runs in a process of its own, so that one that fails stops no other.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import torch
from harness import bench_modules, measure_module
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sglang_dspark.tools import provenance

_QUICK_SAMPLES, _SAMPLES = 20, 200


def run_apart(
    module: str, floors: dict[str, Any] | None, num_samples: int, limit_s: float
) -> tuple[list[dict[str, Any]], str]:
    """Measure a module in a process of its own: its records, and what went wrong or an empty string."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "records.jsonl"
        output.touch()
        process = multiprocessing.get_context("spawn").Process(
            target=measure_module, args=(module, floors, num_samples, output)
        )
        process.start()
        process.join(limit_s)
        problem = ""
        if process.is_alive():
            process.kill()
            process.join()
            problem = f"stopped after {limit_s:.0f} s"
        elif process.exitcode != 0:
            problem = f"the process ended with status {process.exitcode}"
        return [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()], problem


def result_table(records: list[dict[str, Any]]) -> Table:
    """Records for the terminal."""
    table = Table(title="microseconds")
    for name in ("case", "shape"):
        table.add_column(name, overflow="fold")
    for name in ("median", "p10", "p90", "torch", "floor", "ratio"):
        table.add_column(name, justify="right")
    table.add_column("note", overflow="fold")
    for record in records:
        name = record.get("case", record["module"])
        shape = " ".join(f"{key}={value}" for key, value in record.get("shape", {}).items())
        if "error" in record:
            table.add_row(name, shape, *[""] * 6, f"[red]{escape(record['error'].splitlines()[0])}[/red]")
            continue
        times = (record[key] for key in ("median_us", "p10_us", "p90_us", "reference_us", "floor_us", "ratio"))
        cells = ("-" if time is None else f"{time:.2f}" for time in times)
        table.add_row(name, shape, *cells, escape(record["note"]) or ("fits L2" if record["fits_l2"] else ""))
    return table


@click.command(help=__doc__)
@click.option("--output", type=click.Path(path_type=Path), required=True, help="JSON file to write.")
@click.option("--quick", is_flag=True, help=f"{_QUICK_SAMPLES} samples per case instead of {_SAMPLES}.")
@click.option("--only", default="", help="Modules to run, without bench_, separated by commas; all by default.")
@click.option("--limit", "limit_s", default=240.0, show_default=True, help="Seconds until a module is stopped.")
def main(output: Path, quick: bool, only: str, limit_s: float) -> None:
    """Command line; see the module."""
    if not torch.cuda.is_available():
        raise click.ClickException("kernels are timed on an NVIDIA GPU, and PyTorch sees none on this machine")
    modules = bench_modules(only)
    num_samples = _QUICK_SAMPLES if quick else _SAMPLES
    console = Console()
    floors, problem = run_apart("", None, num_samples, limit_s)
    if not floors:
        raise click.ClickException(f"the device could not be measured: {problem}")
    console.print(
        f"{provenance.gpu()}: copy {floors[0]['copy_gb_per_s']:.0f} GB/s, bf16 {floors[0]['bf16_tflop_per_s']:.0f} "
        f"TFLOP/s, empty kernel {floors[0]['empty_us']:.2f} us"
    )
    records: list[dict[str, Any]] = []
    for module in modules:
        console.print(f"{module} ...")
        found, problem = run_apart(module, floors[0], num_samples, limit_s)
        records += found
        if problem:
            records.append({"module": module, "error": problem})
    console.print(result_table(records))
    output.parent.mkdir(parents=True, exist_ok=True)
    document = {
        **provenance.record(),
        "floors": floors[0],
        "cases": records,
    }
    provenance.write_json(output, document)
    if any("error" in record for record in records):
        sys.exit(1)


if __name__ == "__main__":
    main()
