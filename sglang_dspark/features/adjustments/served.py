"""Adjust logits in a scheduler."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from dspark_kernels import AdjustmentTable, adjust

from sglang_dspark.engine.feature import Part, Worker
from sglang_dspark.engine.sglang_types import ScheduleBatch
from sglang_dspark.features.adjustments.adjuster import FIRST_SLOTS, LogitsAdjuster, StepAdjuster
from sglang_dspark.step.state import VerifyPlan
from sglang_dspark.step.transfers import host_index


class Adjustments(Part):
    """Do to logits what SGLang's sampler does.

    Args:
        vocab_size: of the target.
        device: of the target.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._adjuster = LogitsAdjuster(vocab_size, device)

    @classmethod
    def of(cls, worker: Worker) -> Adjustments:
        """Return the part of a worker."""
        runner = worker.model_runner
        return cls(int(runner.model_config.vocab_size), torch.device(runner.device))

    def first_logits(self, batch: ScheduleBatch, logits: torch.Tensor) -> None:
        self._adjuster.begin(batch, logits)

    def first_tokens(self, batch: ScheduleBatch, tokens: torch.Tensor) -> None:
        self._adjuster.count(batch.reqs, tokens[:, None])

    def step_comes(self, batch: ScheduleBatch) -> StepAdjuster | None:
        return self._adjuster.of_step(batch)

    def warm_up(self, plan: VerifyPlan, logits: torch.Tensor) -> None:
        table = AdjustmentTable.empty(1, logits.shape[1], logits.device)
        no_slot = host_index([-1], logits.device)
        adjust(logits, table, no_slot, plan.requests, plan.columns, plan.input_ids, plan.indptr)

    def held(self, requests: int) -> AbstractContextManager[object]:
        """Hold the table of all requests: once some have adjustments, it lies beside every step."""
        slots = max(FIRST_SLOTS, 2 ** (requests - 1).bit_length())
        # It doubles, from one that is copied.
        return nullcontext(AdjustmentTable.empty(slots // 2, self._vocab_size, self._device).grown(slots))
