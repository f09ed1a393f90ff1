"""Reading ``sweep.csv``, also of releases that wrote fewer columns."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from serving.row import COLUMNS
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
    """Return the rows of a ``sweep.csv``, completed by :func:`complete`.

    Raises:
        ConfigError: the file has no rows.
    """
    frame = pd.read_csv(path)
    if frame.empty:
        raise ConfigError(f"{path} has no rows; run benchmarks/sweep_concurrency.py to the end of a round first")
    return complete(frame)


def complete(frame: pd.DataFrame) -> pd.DataFrame:
    """Add a column ``load`` (its name), and what older files lack as far as their counts tell it.

    ``frame.attrs["absent"]`` names the columns that the file does not have.

    Files from before open loops have users only. Mean verify length, wasted and parked share follow from the counts;
    percentiles over requests and goodput cannot be recovered, and are left out.
    """
    frame = frame.copy()
    frame.attrs["absent"] = [column for column in COLUMNS if column not in frame]
    if "rate" not in frame:
        frame["rate"] = float("nan")
    # Whole numbers again: a column with empty cells is read as floats.
    frame["concurrency"] = frame["concurrency"].astype("Int64")
    frame["load"] = [
        load_label(None if pd.isna(users) else int(users), None if pd.isna(rate) else rate)
        for users, rate in zip(frame["concurrency"], frame["rate"], strict=True)
    ]
    derived = {
        "mean_verify_len": ("verified", "decode_rounds"),
        "plain_share": ("plain_steps", "steps"),
    }
    for column, (part, whole) in derived.items():
        if column not in frame and {part, whole} <= set(frame.columns):
            frame[column] = frame[part] / frame[whole].where(frame[whole] > 0)
    if "wasted_share" not in frame and {"accepted", "verified"} <= set(frame.columns):
        frame["wasted_share"] = 1 - frame["accepted"] / frame["verified"].where(frame["verified"] > 0)
    return frame
