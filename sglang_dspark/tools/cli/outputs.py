"""Show and write the results of commands: bars, tables and files."""

from __future__ import annotations

import csv
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sglang_dspark.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


class OutputFile(click.Path):
    """A file that the command writes at its end. What would fail then is refused before a server has worked."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the path, whose folder exists."""
        path = Path(str(super().convert(value, param, ctx)))
        flag = param.opts[0] if param is not None else "file"
        if not path.parent.is_dir():
            raise ConfigError(f"{flag} {path}: there is no folder {path.parent}; make it first")
        return path


@contextmanager
def progress_bars(console: Console, totals: dict[str, int]) -> Iterator[list[Callable[..., None]]]:
    """Show a bar with an estimate of the time left for each of ``{what: how many}``, until the block ends.

    What it yields is called with what was done since the last call, 1 by default.
    """
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield [partial(progress.advance, progress.add_task(what, total=total)) for what, total in totals.items()]


def new_table(*headings: str, title: str | None = None, left: Collection[str] = ()) -> Table:
    """Return an empty table: columns with headings in ``left`` are flush left and never cut, others flush right."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    # A title is wrapped at the width of its table.
    table = Table(
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        title=title,
        title_justify="left",
        min_width=len(title or ""),
    )
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right", no_wrap=heading in left)
    return table


def write_csv(path: Path, rows: Sequence[Mapping[str, str | float]]) -> None:
    """Write rows that all have the same columns, one at least; numbers with six digits."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({name: x if isinstance(x, str) else f"{x:.6g}" for name, x in row.items()})
