"""Find by brute force what promised users can have at most, on Qwen3-8B's shape on an H200.

    python benchmarks/promise_bounds.py --output benchmarks/results/h200/promises/bounds.json

Drafts of promised users rank by their survivals, and those of the others by theirs times a weight. Of all weights and
all sizes of a step, the one that brings promised users the least time per token is found, among those with 0.97 of the
tokens of ``auto``. Survivals are known exactly, and nothing but decoding is done: no law can have more on average.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import numpy as np

from sglang_dspark.scheduling.sps_table import SpsTable
from sglang_dspark.tools import provenance
from sglang_dspark.tools.simulator.blocks import ConditionalAcceptance

TABLE = Path(__file__).parent / "results" / "h200" / "simulated_loads" / "sps.json"
TEXTS = {
    "chat": (0.735, 0.738, 0.740, 0.744, 0.758, 0.766, 0.761),
    "mathematics": (0.905, 0.890, 0.888, 0.885, 0.887, 0.891, 0.882),
}
"""Conditional acceptance by position, as the paper has measured it (Fig. 2)."""
LEAST_SPEED = 0.97
DRAFTS = 100_000  # of which a mean is taken


def least_share(text: str, users: int, promised: int) -> dict[str, Any]:
    """Return the least time per token of so many promised users, in mean times per token under ``auto``."""
    table, blocks = SpsTable.load(TABLE), ConditionalAcceptance(TEXTS[text])
    batches, times = DRAFTS // (users * blocks.gamma), table.times(users)
    logits, _ = blocks.draw(range(batches * users), np.random.default_rng(0))
    survival = (1 / (1 + np.exp(-logits))).reshape(batches, users, -1).cumprod(2)
    ms = times.at(float(table.contexts[0]))
    step_ms = np.append(ms[0, 0], ms[table.gamma])  # the plain step first
    drafts = np.append(0, np.minimum(times.num_tokens - users, users * table.gamma))

    def gains(weight: float) -> np.ndarray:
        """Return [2, 1 + n] accepted drafts, of promised users and of the others."""
        weights = np.where(np.arange(users) < promised, 1.0, weight)[:, None]
        order = (-survival * weights).reshape(batches, -1).argsort(1)
        ranked = np.take_along_axis(survival.reshape(batches, -1), order, 1)
        ours = order // table.gamma < promised
        sums = np.stack([ranked * ours, ranked * ~ours]).cumsum(2).mean(1)
        return np.concatenate([np.zeros((2, 1)), sums], axis=1)[:, drafts]

    auto = float(((users + gains(1.0).sum(0)) / step_ms).max())
    best = {"share": np.inf}
    for weight in np.geomspace(1, 0.01, 25):
        gained = gains(float(weight))
        speed = (users + gained.sum(0)) / step_ms / auto
        share = step_ms / (1 + gained[0] / promised) / (users / auto)
        place = int(np.where(speed >= LEAST_SPEED, share, np.inf).argmin())
        if share[place] < best["share"]:
            best = {
                "share": round(float(share[place]), 3),
                "weight_of_others": round(float(weight), 3),
                "rows": int(users + drafts[place]),
                "speed": round(float(speed[place]), 3),
            }
    return {"text": text, "users": users, "promised": promised, **best}


@click.command()
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), required=True)
def main(output: Path) -> None:
    """Write the least shares by text, users and promised users."""
    rows = [
        least_share(text, users, users // part) for text in TEXTS for users in (16, 32, 64, 128) for part in (2, 4, 8)
    ]
    provenance.write_json(output, {**provenance.record(), "least_speed": LEAST_SPEED, "rows": rows})


if __name__ == "__main__":
    main()
