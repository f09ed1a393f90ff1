r"""Simulate `auto` beside whole blocks, and with a lean drafter beside SGLang's own worker, at 1 to 128 users.

    python benchmarks/simulated_loads.py

The steps are those of Qwen3-8B's shape on an H200. ``sps.json`` has the plugin's, between those that were measured
with 1, 16 and 64 users (``qwen3_8b_shape/equal``). What SGLang's own worker and a list of 32,768 tokens change is
measured, too (``equal_work``); what 8 bits save is calculated from the bytes that small steps no longer read. The
scheduler's own code decides every step. Confidences know as much as those of simulated acceptance, and drafts of one
text are as hard as those of another. Writes ``loads.csv`` beside the table.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean

import click
import numpy as np
import pandas as pd
from numpy.typing import NDArray
from serving.results import over_rounds, read_sweep
from shape_pair import ACCEPTANCE

from sglang_dspark.calibration.acceptance_law import BETA
from sglang_dspark.scheduling.sps_table import SpsTable
from sglang_dspark.tools import provenance
from sglang_dspark.tools.simulator.blocks import ConditionalAcceptance
from sglang_dspark.tools.simulator.costs import Costs, Prefill
from sglang_dspark.tools.simulator.sweep import Conditions, sweep
from sglang_dspark.tools.simulator.workload import Lengths

H200 = Path(__file__).parent / "results" / "h200"
FOLDER = H200 / "simulated_loads"
KINDS = ("chat", "math")
USERS = (1, 2, 4, 8, 16, 32, 64, 128)
MEASURED = (1, 16, 64)
PROMPT, ANSWER = 100, 512
BYTES_LESS, BYTES_PER_MS = 1.284e9, 4.27e9
"""Of a drafter with a list that is read in 8 bits (benchmarks/README.md), and of an H200."""
ROWS = 128
"""Drafts up to which products read 8 bits."""
ACCEPTED_LESS = 0.013
"""Share of the accept length that half of the vocabulary in 8 bits cost the bundled pair, see ``results/lean``."""


def changed(table: SpsTable, whole_ms: NDArray[np.float64]) -> SpsTable:
    """Return a table whose drafts take so much longer that steps of whole blocks take ``whole_ms [requests]``."""
    more = whole_ms - (table.draft_ms + table.verify_ms)[:, -1, 0]
    drafts = np.array(table.drafts) > 0
    return replace(table, draft_ms=table.draft_ms + (more[:, None] * drafts)[:, :, None])


def tables() -> dict[str, SpsTable]:
    """Return the step times of the plugin, of the same with a lean drafter, and of SGLang's own worker."""
    ours, frame = SpsTable.load(FOLDER / "sps.json"), read_sweep(H200 / "equal_work" / "sweep.csv")
    ms = {
        name: [
            over_rounds(frame[(frame["config"] == name) & (frame["concurrency"] == users)], "itl_p50_ms")
            for users in MEASURED
        ]
        for name in ("builtin", "lean")
    }
    whole = (ours.draft_ms + ours.verify_ms)[:, -1, 0]

    def beside(name: str) -> NDArray[np.float64]:
        """Return milliseconds of whole blocks, by how they compare with ours where both are known."""
        known = np.array(ms[name]) / np.interp(MEASURED, ours.requests, whole)
        return whole * np.interp(ours.requests, MEASURED, known)

    few = np.array(ours.requests) * ours.gamma <= ROWS
    return {
        "own": ours,
        "lean": changed(ours, beside("lean") - few * BYTES_LESS / BYTES_PER_MS),
        "builtin": changed(ours, beside("builtin")),
    }


def blocks(kind: str, less: float = 0.0) -> ConditionalAcceptance:
    """Return drafts of a kind of text, of which a share is kept less often."""
    rates = tuple(rate * (1 - less) for rate in ACCEPTANCE[kind])
    return ConditionalAcceptance(rates, concentration=BETA / (1 - fmean(rates)))


def with_accept_length(kind: str, factor: float) -> ConditionalAcceptance:
    """Return drafts whose accept length is a multiple of what it was."""
    low, high = 0.0, 0.1
    wanted = factor * _accept_length(ACCEPTANCE[kind])
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if _accept_length(blocks(kind, middle).conditional) > wanted else (low, middle)
    return blocks(kind, low)


def _accept_length(rates: tuple[float, ...]) -> float:
    return 1 + float(np.cumprod(rates).sum())


@click.command(help=__doc__)
def main() -> None:
    """Command line; see the module."""
    rows, times = [], tables()
    for kind in KINDS:
        for name, policies in {"own": ("static:7", "auto"), "lean": ("auto",), "builtin": ("static:7",)}.items():
            drafts = with_accept_length(kind, 1 - ACCEPTED_LESS) if name == "lean" else blocks(kind)
            costs = Costs(times[name], Prefill.from_table(times["own"]))
            conditions = Conditions(costs, drafts, Lengths(PROMPT, PROMPT), Lengths(ANSWER, ANSWER))
            for point in sweep(conditions, policies, USERS):
                rows.append({"text": kind, "steps": name, "policy": point.policy, "users": point.users})
                rows[-1] |= asdict(point.figures)
    pd.DataFrame(rows).to_csv(FOLDER / "loads.csv", index=False, float_format="%.6g", lineterminator="\n")
    provenance.write_json(FOLDER / "provenance.json", provenance.record())


if __name__ == "__main__":
    main()
