"""SPS tables computed from formulas, for simulations in which the true time of every step is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sglang_dspark.scheduling.sps_table import SpsTable, geometric_grid

GAMMA = 7
CONTEXTS = (64, 1024)

RESULTS = Path(__file__).parent / "results"

Formula = Callable[..., np.ndarray]  # of requests, drafts and context, arrays that broadcast


def make_table(
    verify: Formula,
    draft: Formula,
    *,
    requests: Sequence[int] = tuple(geometric_grid(64)),
    gamma: int = GAMMA,
    contexts: Sequence[int] = CONTEXTS,
    tiers: Sequence[int] = (),
) -> SpsTable:
    """Return the table whose verification and drafting take the milliseconds of these formulas."""
    axes = np.meshgrid(np.array(requests, float), np.arange(gamma + 1.0), np.array(contexts, float), indexing="ij")
    return SpsTable(
        key={"device": "formula"},
        requests=requests,
        drafts=list(range(gamma + 1)),
        contexts=contexts,
        draft_ms=np.where(axes[1] > 0, draft(*axes), 0.0),
        verify_ms=verify(*axes),
        tiers=tiers,
    )


def compute_bound(**options: Any) -> SpsTable:
    """Return the times of a CPU: every token costs, in the drafter as well."""
    return make_table(
        lambda r, d, c: 10 + r * (1 + d) + 2e-3 * r * c,
        lambda r, d, c: 2 + 0.2 * r * d,
        **options,
    )


def memory_bound(**options: Any) -> SpsTable:
    """Return the times of a GPU: tokens are free up to a point, and the drafter's time is that of its weights."""
    return make_table(
        lambda r, d, c: 10 + 0.04 * np.maximum(r * (1 + d) - 128, 0) + 0.005 * r * (1 + d) + 2e-5 * r * c,
        lambda r, d, c: 2 + 0 * r,
        **options,
    )


def h200(**options: Any) -> SpsTable:
    """Return the times of Qwen3-8B's shape on an H200, between those that were measured there.

    Measured were plain steps and whole blocks of 1, 16 and 64 requests, and 376 rows of 64: medians of results/h200,
    `qwen3_8b_shape/apart` and `equal_work`. Behind 512 rows the last slope goes on.
    """
    rows, ms = (1, 16, 64, 128, 376, 512, 1024), (5.1, 5.2, 5.4, 6.0, 10.9, 13.0, 21.0)
    tiers = [*range(1, 17), *(size * eighth // 8 for size in (16, 32, 64, 128, 256, 512) for eighth in range(9, 17))]
    return make_table(
        lambda r, d, c: np.interp(r * (1 + d), rows, ms) + 0.014 * r,
        lambda r, d, c: 1.25 + 0.0195 * r,
        tiers=tiers,
        **options,
    )


def h200_contexts() -> SpsTable:
    """Return the step times of results/h200/simulated_loads, and what longer contexts take.

    A request's K/V, 147,456 bytes for a token, is read at 4.27 TB/s: 3.5e-5 ms. Measured were 4e-5 (`qwen3_8b_shape`,
    the step of 8 users with 4,000 tokens in `long`).
    """
    table = SpsTable.load(RESULTS / "h200" / "simulated_loads" / "sps.json")
    contexts = np.array([table.contexts[0], 4100])
    read_ms = 3.5e-5 * np.array(table.requests)[:, None, None] * (contexts - contexts[0])
    return replace(
        table,
        key={**table.key, "device": "NVIDIA H200, contexts calculated"},
        contexts=contexts.tolist(),
        draft_ms=table.draft_ms + 0 * read_ms,
        verify_ms=table.verify_ms + read_ms,
    )
