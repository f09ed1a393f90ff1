"""SPS tables computed from formulas, where the true time of every step is known.

A schedule of drafts of three tokens, and records of steps for it to learn from.
"""

from pathlib import Path

import numpy as np
import torch
from dspark_kernels import DraftBlock
from formula_tables import CONTEXTS, GAMMA, compute_bound, make_table, memory_bound

from sglang_dspark.config import DSparkConfig
from sglang_dspark.scheduling.online_calibration import OnlineCalibration
from sglang_dspark.scheduling.schedule import Schedule
from sglang_dspark.scheduling.sps_table import SpsTable
from sglang_dspark.step.decision import StepRecord
from sglang_dspark.step.state import Confidence

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
    """Verification for nothing, and a drafter that takes ``extra_ms`` against a non-speculative step of 10."""
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


BLOCK = 3
CPU = torch.device("cpu")


def table(gamma=BLOCK):
    """Verifying a draft takes 1 ms for the batch, drafting 1 ms per request."""
    drafts, requests = np.arange(gamma + 1.0), np.array([[1.0], [4.0]])
    verify, draft = 10 + drafts + 0 * requests, np.where(drafts > 0, 1.0, 0.0) * requests
    return SpsTable({}, [1, 4], range(gamma + 1), [64], draft[..., None], verify[..., None])


def schedule(*, gamma=BLOCK, with_head=True, with_table=True, **options):
    made = Schedule(DSparkConfig(**options), gamma, OnlineCalibration(gamma) if with_head else None, CPU)
    made.start(table(gamma) if with_table else None)
    return made


def record(decision, drafted, verify_lens, logits=None, survival=None):
    requests = [f"r{index}" for index in range(len(drafted))]
    return StepRecord(requests, decision, drafted, torch.tensor(verify_lens), confidence(logits, survival), None)


def confidence(logits, survival):
    if logits is None and survival is None:
        return None
    return Confidence(logits, torch.full_like(logits, torch.nan) if survival is None else survival)


def tokens(requests, depth):
    return DraftBlock(torch.zeros(requests, depth, dtype=torch.int64))
