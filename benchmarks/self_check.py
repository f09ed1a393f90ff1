"""Counts false alarms of the self-check, and the planted faults that it finds, in starts with drafters of random forms.

    TRITON_INTERPRET=1 python benchmarks/self_check.py --starts 200 --output benchmarks/results/self_check.json

A start is the warm-up and the graphs of a small server, with interpreted kernels on a CPU. A fault changes one number
that a kernel gives: an integer by one, another number by a tenth of the largest one. A faulty graph leaves its results
as they were. Each start with a fault has another form. A fault is also found if the kernel that calls the faulty one is
named.
"""

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import Pool
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import dspark_kernels
import pytest
import torch
from rich.progress import track

from sglang_dspark.errors import EngineError
from sglang_dspark.tools import provenance
from sglang_dspark.worker import self_check

TESTS = provenance.REPOSITORY / "tests"
sys.path += [str(TESTS / "support"), str(TESTS / "server" / "emulated_graphs")]

from faults import GRAPH, VARIABLE, faulty  # noqa: E402
from random_start import RandomStart  # noqa: E402

KERNELS = (
    *("add_norm", "silu_mul", "qk_norm_rope", "window_attention", "draft_block", "block_confidence", "accept"),
    *("prepare", "plan_top", "plan_uniform", "plan_staged", "kv_inject"),
)


@contextmanager
def planted(name: str) -> Iterator[list[str]]:
    """Have this kernel, or every graph, be wrong inside the block. Yields a list with an entry for each that runs."""
    ran: list[str] = []
    if name == GRAPH:
        ran.append(name)
        with patch.dict(os.environ, {VARIABLE: name}):
            yield ran
        return
    function = getattr(dspark_kernels, name)
    with patch.object(function, "kernel", faulty(function, ran)):
        yield ran


def starts_with(name: str, number: int) -> dict[str, int]:
    """Return in how many starts this fault ran, and in how many of them it was found, and by its name."""
    counts = {"ran": 0, "found": 0, "found by name": 0}
    for seed in range(number):
        with planted(name) as ran:
            alarm = start(1000 + seed).get("alarm", "")
        counts["ran"] += bool(ran)
        counts["found"] += bool(alarm)
        counts["found by name"] += f"a fault in {name} on" in alarm
    return counts


def start(seed: int) -> dict[str, Any]:
    """Return what a start says of its check, or the alarm that ended it."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(self_check, "CACHE", Path(folder) / "checked")
        monkeypatch.setattr(self_check, "LIMIT_S", float("inf"))
        try:
            return RandomStart(monkeypatch, seed, Path(folder) / "draft").check().describe()
        except EngineError as error:
            return {"alarm": str(error)}


@click.command()
@click.option("--starts", default=200, show_default=True)
@click.option("--faults", default=10, show_default=True, help="Starts with a fault in each kernel.")
@click.option("--output", type=click.Path(path_type=Path), required=True)
def main(starts: int, faults: int, output: Path) -> None:
    """Start without and with faults, and write what was found."""
    if "TRITON_INTERPRET" not in os.environ:
        raise click.UsageError("kernels are to be interpreted: set TRITON_INTERPRET=1 in the environment")
    torch.set_num_threads(1)
    began = time.monotonic()
    names = (*KERNELS, GRAPH)
    with Pool() as pool:
        sound = list(track(pool.imap(start, range(starts)), "starts without a fault", total=starts))
        found = track(pool.imap(partial(starts_with, number=faults), names), "starts with a fault", total=len(names))
        with_faults = dict(zip(names, found, strict=True))
    passed = [found for found in sound if "alarm" not in found]
    provenance.write_json(
        output,
        {
            **provenance.record(),
            "starts": starts,
            "alarms": [found["alarm"] for found in sound if "alarm" in found],
            "unchecked": [found["unchecked"] for found in passed if found["unchecked"]],
            "forms": sum(found["forms"] for found in passed),
            "graphs": sum(found["graphs"] for found in passed),
            "kernels": max(found["kernels"] for found in passed),
            "faults": with_faults,
            "minutes": round((time.monotonic() - began) / 60, 1),
        },
    )
    click.echo(output)


if __name__ == "__main__":
    main()
