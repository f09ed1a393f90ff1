"""SPS tables computed from formulas, where the true time of every step is known."""

from collections.abc import Callable, Sequence
from pathlib import Path

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


def compute_bound(**options) -> SpsTable:
    """A CPU: every token costs, in the drafter as well."""
    return make_table(
        lambda r, d, c: 10 + r * (1 + d) + 2e-3 * r * c,
        lambda r, d, c: 2 + 0.2 * r * d,
        **options,
    )


def memory_bound(**options) -> SpsTable:
    """A GPU: tokens are free up to a point, and the drafter's time is that of its weights."""
    return make_table(
        lambda r, d, c: 10 + 0.04 * np.maximum(r * (1 + d) - 128, 0) + 0.005 * r * (1 + d) + 2e-5 * r * c,
        lambda r, d, c: 2 + 0 * r,
        **options,
    )


def costly_drafts(extra_ms: float, **options) -> SpsTable:
    """Verification for nothing, and a drafter that takes ``extra_ms`` against a plain step of 10."""
    return make_table(lambda r, d, c: 10 + 0 * r, lambda r, d, c: extra_ms + 0 * r, **options)


def random_table(rng: np.random.Generator, **options) -> SpsTable:
    """Times without rhyme or reason, within a factor of 3."""
    return make_table(
        lambda r, d, c: rng.uniform(5, 15, size=r.shape),
        lambda r, d, c: rng.uniform(1, 3, size=r.shape),
        **options,
    )


def write_table(folder: Path, gamma: int = 2) -> Path:
    """A file: 10 ms for a step, and 1 for each draft of a request."""
    drafts, requests = np.arange(gamma + 1.0), np.array([[1.0], [8.0]])
    verify, draft = 10 + drafts * requests, np.where(drafts > 0, 1.0, 0.0) + 0 * requests
    table = SpsTable({"dtype": "float32"}, [1, 8], range(gamma + 1), [64], draft[..., None], verify[..., None])
    table.save(folder / "sps.json")
    return folder / "sps.json"
