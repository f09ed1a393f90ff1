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
    """Show a bar with an estimate of the time left for each of ``{what: how many}``, until the block ends."""
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield [partial(progress.advance, progress.add_task(what, total=total)) for what, total in totals.items()]
