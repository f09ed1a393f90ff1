"""SPS tables computed from formulas, where the true time of every step is known."""

from pathlib import Path

import numpy as np
from formula_tables import CONTEXTS, GAMMA, compute_bound, make_table, memory_bound

from sglang_dspark.scheduling.sps_table import SpsTable

__all__ = [
    "CONTEXTS",
    "GAMMA",
    "compute_bound",
    "costly_drafts",
    "h200_table",
    "make_table",
    "memory_bound",
    "random_table",
    "write_table",
]

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def h200_table(file: str) -> SpsTable:
    """A committed table of Qwen3-8B's shape on an H200."""
    return SpsTable.load(RESULTS / "h200" / file)


def costly_drafts(extra_ms: float, **options) -> SpsTable:
    """Verification for nothing, and a drafter that takes ``extra_ms`` against a plain step of 10."""
    return make_table(lambda r, d, c: 10 + 0 * r, lambda r, d, c: extra_ms + 0 * r, **options)


def random_table(rng: np.random.Generator, **options) -> SpsTable:
    """Times without rhyme or reason, within a factor of 3."""
    return make_table(
        lambda r, d, c: rng.uniform(5, 15, size=r.shape), lambda r, d, c: rng.uniform(1, 3, size=r.shape), **options
    )


def write_table(folder: Path, gamma: int = 2) -> Path:
    """A file: 10 ms for a step, and 1 for each draft of a request."""
    drafts, requests = np.arange(gamma + 1.0), np.array([[1.0], [8.0]])
    verify, draft = 10 + drafts * requests, np.where(drafts > 0, 1.0, 0.0) + 0 * requests
    table = SpsTable({"dtype": "float32"}, [1, 8], range(gamma + 1), [64], draft[..., None], verify[..., None])
    table.save(folder / "sps.json")
    return folder / "sps.json"
