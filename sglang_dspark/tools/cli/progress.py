"""The bars of commands that count what they have done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console


class Advance(Protocol):
    """Counts what was done since the last call; parts count as well."""

    def __call__(self, advance: float = 1) -> None: ...


@contextmanager
def progress_bars(console: Console, totals: dict[str, int]) -> Iterator[list[Advance]]:
    """A bar with an estimate of the time left for each of ``{what: how many}``. They go away at the end."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    description = TextColumn("{task.description}")
    columns = (BarColumn(), description, MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield [partial(progress.advance, progress.add_task(what, total=total)) for what, total in totals.items()]


@contextmanager
def progress_bar(console: Console, what: str, total: int) -> Iterator[Advance]:
    """A bar over ``total`` of ``what``; calling what it gives counts one."""
    with progress_bars(console, {what: total}) as (advance,):
        yield advance
