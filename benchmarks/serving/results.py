"""Reading ``sweep.csv``, and figures of several of its rows."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from serving.schedule import load_label
from sglang_dspark.errors import ConfigError

COUNTED_BY = {
    "accept_length": "decode_rounds",
    "mean_verify_len": "decode_rounds",
    "wasted_share": "verified",
    "plain_share": "steps",
    "parked_share": "steps",
}
"""Quotient of two counts -> the column with its denominator."""


def over_rounds(rows: pd.DataFrame, column: str) -> float:
    """Return one figure for several rounds of a configuration at a load; NaN without a value.

    Quotients of counts are pooled: the counts of all rounds are added up before they are divided, because a short round
    says less than a long one. Everything else, times and speeds, is the median, which a disturbed round does not move.
    """
    if column not in rows:
        return float("nan")
    known = rows[rows[column].notna()]
    counted_by = COUNTED_BY.get(column)
    if counted_by is None:
        return float(known[column].median())
    if counted_by not in known or known[counted_by].isna().any():
        return float(known[column].mean())  # SGLang's own algorithms tell the quotient only
    weights = known[counted_by]
    return float((known[column] * weights).sum() / weights.sum()) if weights.sum() else float("nan")


def config_name(frame: pd.DataFrame, label: str) -> str:
    """Return the configuration's name without a dtype that all of them share."""
    return label.split("@", maxsplit=1)[0] if frame["dtype"].nunique() == 1 and label.count("@") == 1 else label


def read_sweep(path: Path) -> pd.DataFrame:
    """Return the rows of a ``sweep.csv`` or ``turns.csv``, as :func:`with_loads` gives them.

    Raises:
        ConfigError: the file has no rows.
    """
    frame = pd.read_csv(path)
    if frame.empty:
        raise ConfigError(f"{path} has no rows; run benchmarks/sweep_concurrency.py to the end of a round first")
    return with_loads(frame)


def with_loads(frame: pd.DataFrame) -> pd.DataFrame:
    """Add a column ``load``, the name of the number of users."""
    return frame.assign(load=frame["concurrency"].map(load_label))
