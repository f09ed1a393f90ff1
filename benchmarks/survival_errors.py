r"""Compare estimates of drafts' survival on recorded blocks, and what they bring.

    python benchmarks/survival_errors.py SELECTOR.jsonl VANILLA.jsonl --output errors.json

Each file is of ``sglang-dspark evaluate --blocks``. A round is predicted before its outcome is known: by the head's
logits as they are (``raw``), by the same after online calibration (``online``), and by the acceptance of drafts at the
same position so far (``history``). Rounds come one at a time, as a lone user's do; the first ones only teach.

The same blocks are served by ``auto`` in simulated time, with and without these logits: the tokens per second that they
bring more than history does. Both servers of a seed get the same blocks and the same noise of step times.
"""

from __future__ import annotations

from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table
from simulated import MACHINES, Loop, Recorded, Traffic

from sglang_dspark.calibration.metrics import errors
from sglang_dspark.calibration.online import OnlineCalibration
from sglang_dspark.calibration.survival import Floats, prefix_survival, sigmoid, survived
from sglang_dspark.config import DSparkConfig
from sglang_dspark.scheduling.position_acceptance import PositionAcceptance
from sglang_dspark.tools import provenance
from sglang_dspark.tools.simulator.blocks import RecordedBlocks

LEAD_IN_ROUNDS = 100
STEPS = {1: 1200, 8: 600, 64: 300}
"""Of a run, by the number of requests."""
SEEDS = range(3)


def predictions(blocks: RecordedBlocks) -> dict[str, Floats]:
    """Return [n, gamma] survivals by estimate; blocks without logits have but a history."""
    calibration, history = OnlineCalibration(blocks.gamma), PositionAcceptance(blocks.gamma)
    made: dict[str, list[Floats]] = {}
    for row, count in enumerate(blocks.accepted):
        verified, accepted = np.array([blocks.gamma]), np.array([count])
        conditional = {"history": history.conditional()}
        history.observe(verified, accepted)
        if blocks.logits is not None:
            logits = blocks.logits[row : row + 1]
            conditional["raw"] = sigmoid(logits[0])
            conditional["online"] = sigmoid(calibration.scale * logits[0] + calibration.shift)
            calibration.observe(logits, verified, accepted)
        for name, values in conditional.items():
            made.setdefault(name, []).append(values)
    return {name: prefix_survival(np.array(values)) for name, values in made.items()}


def by_position(blocks: RecordedBlocks) -> dict[str, list[dict[str, Any]]]:
    """Return the errors of every estimate, a row per position."""
    seen = survived(blocks.accepted, blocks.gamma)[LEAD_IN_ROUNDS:]
    found = {name: predicted[LEAD_IN_ROUNDS:] for name, predicted in predictions(blocks).items()}
    return {name: [asdict(errors(*pair)) for pair in zip(p.T, seen.T, strict=True)] for name, p in found.items()}


def gains(file: Path) -> list[dict[str, Any]]:
    """Return by how much logits beat history in the closed loop, each seed by itself, for every machine and load."""
    rows = []
    for machine, (load, steps) in product(MACHINES, STEPS.items()):
        ratios = []
        for seed in SEEDS:
            by_head = {
                head: Loop(
                    machine,
                    Traffic(lambda head=head: [Recorded(head=head, file=file)]),
                    load,
                    steps,
                    seed,
                    DSparkConfig(),
                ).run()
                for head in (True, False)
            }
            ratios.append(by_head[True][0] / by_head[False][0])
        rows.append({"machine": machine, "load": load, "steps": steps, "of_history": ratios})
    return rows


@click.command(help=__doc__)
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--output", required=True, type=click.Path(path_type=Path))
def main(files: tuple[Path, ...], output: Path) -> None:
    """Write and show the errors."""
    results, table = [], Table("blocks", "estimate", "draft", "ECE", "noise", "AUC", "Brier")
    loop = Table("blocks", "machine", "requests", "tokens per second by logits / by history")
    for path in files:
        blocks = RecordedBlocks.load(path)
        result = {"blocks": path.name, "rounds": len(blocks.accepted), "lead_in": LEAD_IN_ROUNDS}
        results.append(result | {"accept_length": 1 + float(blocks.accepted.mean()), "errors": by_position(blocks)})
        if blocks.logits is not None:
            results[-1]["closed_loop"] = gains(path)
            for row in results[-1]["closed_loop"]:
                low, *_, high = sorted(row["of_history"])
                loop.add_row(path.name, row["machine"], str(row["load"]), f"{low:.3f} to {high:.3f}")
        for name, rows in results[-1]["errors"].items():
            for draft, row in enumerate(rows, start=1):
                figures = ("-" if value is None else f"{value:.4f}" for value in row.values())
                table.add_row(path.name, name, str(draft), *figures)
    provenance.write_json(output, {**provenance.record(), "results": results})
    Console().print(table, loop)


if __name__ == "__main__":
    main()
