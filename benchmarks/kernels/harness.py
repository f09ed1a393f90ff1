"""Cases of kernels: a module ``bench_<folder>.py`` beside this file yields those of a folder of kernels."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch


@dataclass(frozen=True)
class Case:
    """A kernel at one size.

    Attributes:
        name: what runs, e.g. ``kv_inject``; the same at all sizes.
        shape: sizes by letter, e.g. ``{"bs": 64, "gamma": 7}``.
        run: one launch on the current stream, without a host sync. May be called any number of times.
        reference: the torch form of the same.
        bytes_moved: what has to be read and written at least, each byte once.
        flops: matrix arithmetic; 0 if memory decides.
        capability: compute capability that it needs, e.g. 89.
    """

    name: str
    shape: dict[str, int]
    run: Callable[[], object]
    reference: Callable[[], object]
    bytes_moved: int
    flops: int = 0
    capability: int = 80


def case(kernel: Any, shape: dict[str, int], *arguments: Any, bytes_moved: int, name: str = "") -> Case:
    """Return the case of a function that is decorated with ``on_kernels``, called with these arguments."""
    forms = partial(kernel, *arguments), partial(kernel.reference, *arguments)
    return Case(name or kernel.__name__, shape, *forms, bytes_moved)


def all_cases(device: torch.device, only: str = "") -> Iterator[Case]:
    """Yield the cases of the folders that ``only`` names, separated by commas, or all; one is in memory at a time.

    Raises:
        ClickException: there is no folder of such a name.
    """
    folders = sorted(path.stem.removeprefix("bench_") for path in Path(__file__).parent.glob("bench_*.py"))
    wanted = only.split(",") if only else folders
    if unknown := sorted(set(wanted) - set(folders)):
        raise click.ClickException(f"--only names {', '.join(unknown)}; there are {', '.join(folders)}")
    for folder in wanted:
        torch.manual_seed(0)
        yield from importlib.import_module(f"bench_{folder}").cases(device)
