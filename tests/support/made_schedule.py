"""A schedule of drafts of three tokens, and records of steps for it to learn from."""

import numpy as np
import torch
from dspark_kernels import DraftBlock

from sglang_dspark.config import DSparkConfig
from sglang_dspark.scheduling.online_calibration import OnlineCalibration
from sglang_dspark.scheduling.schedule import Schedule
from sglang_dspark.scheduling.sps_table import SpsTable
from sglang_dspark.step.decision import StepRecord
from sglang_dspark.step.state import Confidence

GAMMA = 3
CPU = torch.device("cpu")


def table(gamma=GAMMA):
    """Verifying a draft takes 1 ms for the batch, drafting 1 ms per request."""
    drafts, requests = np.arange(gamma + 1.0), np.array([[1.0], [4.0]])
    verify, draft = 10 + drafts + 0 * requests, np.where(drafts > 0, 1.0, 0.0) * requests
    return SpsTable({}, [1, 4], range(gamma + 1), [64], draft[..., None], verify[..., None])


def schedule(*, gamma=GAMMA, with_head=True, with_table=True, **options):
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
