"""Launches of every kernel at several sizes: a module ``cases_<folder>.py`` yields those of a folder of kernels."""

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
        name: what runs, e.g. ``kv_inject``.
        run: one launch.
        capability: compute capability that it needs, e.g. 89.
    """

    name: str
    run: Callable[[], object]
    capability: int = 80


def case(kernel: Any, *arguments: Any, name: str = "", capability: int = 80, **options: Any) -> Case:
    """Return the case of a function that is decorated with ``on_kernels``, called with these arguments."""
    return Case(name or kernel.__name__, partial(kernel, *arguments, **options), capability)


def all_cases(device: torch.device, only: str = "") -> Iterator[Case]:
    """Yield the cases of the folders that ``only`` names, separated by commas, or of all.

    Raises:
        ClickException: there is no folder of such a name.
    """
    folders = sorted(path.stem.removeprefix("cases_") for path in Path(__file__).parent.glob("cases_*.py"))
    wanted = only.split(",") if only else folders
    if unknown := sorted(set(wanted) - set(folders)):
        raise click.ClickException(f"--only names {', '.join(unknown)}; there are {', '.join(folders)}")
    for folder in wanted:
        yield from importlib.import_module(f"cases_{folder}").cases(device)
