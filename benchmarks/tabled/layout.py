"""What the tables of measured figures share: where the files are, and how a table and its note look."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from serving.results import read_sweep

RESULTS = Path(__file__).resolve().parents[1] / "results"
WIDTH = 140


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = ["|" + "---|" * len(header), *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join([f"| {' | '.join(header)} |", *lines])


def section(header: Sequence[str], rows: Sequence[Sequence[str]], note: str) -> str:
    """Return a table and the note under it."""
    filled = textwrap.fill(note, WIDTH, break_long_words=False, break_on_hyphens=False)
    return f"{markdown_table(header, rows)}\n\n{filled}"


def speed_text(tokens_per_second: float) -> str:
    """Return a speed, with a decimal if it is a low one."""
    return f"{tokens_per_second:,.0f}" if tokens_per_second >= 100 else f"{tokens_per_second:.1f}"


def closed_loop(folder: str) -> pd.DataFrame:
    """Return the rows of a sweep that measured a number of users."""
    frame = read_sweep(RESULTS / folder / "sweep.csv")
    return frame[frame["concurrency"].notna()]


def content_of(file: str) -> dict[str, Any]:
    """Return what a file in ``RESULTS`` holds."""
    content: dict[str, Any] = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    return content


def versions_of(row: Any) -> dict[str, str]:
    """Return the versions of packages that a row of a sweep names."""
    return dict(version.split("=") for version in row["versions"].split())
