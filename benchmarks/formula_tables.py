"""SPS tables computed from formulas, for simulations in which the true time of every step is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sglang_dspark.scheduling.sps_table import SpsTable, geometric_grid

GAMMA = 7
CONTEXTS = (64, 1024)

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
