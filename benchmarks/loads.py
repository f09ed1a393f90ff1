r"""Simulate ``auto`` beside whole blocks at 1 to 128 users, in step times that were measured on an H200.

    python benchmarks/loads.py --output benchmarks/results/h200/simulated_loads

The steps are those of Qwen3-8B's shape in ``results/h200/qwen3_8b_shape``, at 1, 16 and 64 users: plain ones, whole
blocks, and those of ``auto``. Between these and beyond, a verification takes its time by rows, a draft by requests.
The scheduler's own code decides every step. Confidences know as much as those of simulated acceptance do, and drafts
of one text are as hard as those of another.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from statistics import fmean

import click
import numpy as np
import pandas as pd
from serving.results import over_rounds, read_sweep
from shape_pair import ACCEPTANCE

from sglang_dspark.calibration.acceptance_law import BETA
from sglang_dspark.scheduling.sps_table import SpsTable
from sglang_dspark.tools import provenance
from sglang_dspark.tools.simulator.blocks import ConditionalAcceptance
from sglang_dspark.tools.simulator.costs import Costs, Prefill
from sglang_dspark.tools.simulator.sweep import Conditions, sweep
from sglang_dspark.tools.simulator.workload import Lengths
from sglang_dspark.worker.tiers import Tiers

MEASURED = Path(__file__).parent / "results" / "h200" / "qwen3_8b_shape" / "equal" / "sweep.csv"
KINDS = ("chat", "math")
USERS = (1, 16, 32, 64, 128)
GAMMA = 7
PROMPT, ANSWER = 100, 512


def step_times(measured: Path = MEASURED) -> SpsTable:
    """Return the times of steps by the measured ones.

    A draft of 16 requests takes as long as that of a single one: both read the drafter's weights. From 128 rows on, a
    verification takes its time by the row, as between whole blocks of 64 requests and the fewer drafts of ``auto``.
    """
    frame = read_sweep(measured)
    cells = dict(iter(frame.groupby(["config", "concurrency"])))
    plain, whole = ([_ms(cells[name, users]) for users in (1, 16, 64)] for name in ("off", "static7"))
    part = cells["auto", 64]
    rows = 64 * (1 + over_rounds(part, "mean_verify_len"))
    row_ms = (whole[2] - _ms(part)) / (64 * (1 + GAMMA) - rows)
    draft = [whole[0] - np.interp(1 + GAMMA, (1, 16), plain[:2])] * 2
    at_128 = whole[1] - draft[1]
    draft.append(whole[2] - at_128 - row_ms * (64 * (1 + GAMMA) - 128))
    most, drafts = max(USERS), np.arange(GAMMA + 1)
    requests = [2**power for power in range(most.bit_length())]
    verified = np.outer(requests, 1 + drafts)
    verify_ms = np.interp(
        verified, (1, 16, 64, 128, 128 + verified.max()), (*plain, at_128, at_128 + row_ms * verified.max())
    )
    slope = (draft[2] - draft[1]) / (64 - 16)
    draft_ms = np.interp(requests, (1, 16, most), (*draft[:2], draft[1] + slope * (most - 16)))
    return SpsTable(
        key={"device": "NVIDIA H200", "target": "Qwen3-8B's shape"},
        requests=requests,
        drafts=drafts.tolist(),
        contexts=[PROMPT],
        draft_ms=(draft_ms[:, None] * (drafts > 0))[:, :, None],
        verify_ms=verify_ms[:, :, None],
        tiers=Tiers.of(requests, GAMMA).tokens,
    )


def _ms(cells: pd.DataFrame) -> float:
    """Return the time of a step: the median time between two chunks of a stream."""
    return over_rounds(cells, "itl_p50_ms")


@click.command(help=__doc__)
@click.option("--output", required=True, type=click.Path(file_okay=False, path_type=Path), help="Folder for results.")
def main(output: Path) -> None:
    """Command line; see the module."""
    costs, rows = Costs(table := step_times(), Prefill.from_table(table)), []
    for kind in KINDS:
        blocks = ConditionalAcceptance(rates := ACCEPTANCE[kind], concentration=BETA / (1 - fmean(rates)))
        conditions = Conditions(costs, blocks, Lengths(PROMPT, PROMPT), Lengths(ANSWER, ANSWER))
        points = sweep(conditions, ("static:7", "auto"), USERS)
        rows += [{"text": kind, "policy": one.policy, "users": one.users} | asdict(one.figures) for one in points]
    output.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_csv(output / "loads.csv", index=False, float_format="%.6g", lineterminator="\n")
    provenance.write_json(output / "provenance.json", provenance.record())


if __name__ == "__main__":
    main()
