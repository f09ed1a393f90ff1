"""Treats NaN in logits as SGLang's sampler does."""

from __future__ import annotations

from typing import Self

import torch
from sglang.srt.environ import envs
from sglang.srt.utils.async_probe import sanitize_nan_logits

from sglang_dspark.engine.part import Part, Worker
from sglang_dspark.engine.sglang_types import ScheduleBatch
from sglang_dspark.step.state import VerifyPlan

SWITCHES = (
    envs.SGLANG_SANITIZE_NAN_LOGITS,
    envs.SGLANG_ENABLE_ASYNC_ASSERT,
    envs.SGLANG_ENABLE_NAN_LOGITS_CHECK,
)
"""Switches of SGLang by which its sampler looks for NaN."""


class NanCheck(Part):
    """Looks at all logits before anything else does; itself its part of every step."""

    @classmethod
    def of(cls, worker: Worker) -> Self | None:
        """Return the check; None if no switch asks for it."""
        return cls() if any(switch.get() for switch in SWITCHES) else None

    def first_logits(self, batch: ScheduleBatch, logits: torch.Tensor) -> None:
        sanitize_nan_logits(logits, msg="DSPARK: target logits")

    def step_comes(self, batch: ScheduleBatch) -> Self:
        return self

    def before_verify(self, plan: VerifyPlan) -> None:
        """Wait for the logits."""

    def after_verify(self, plan: VerifyPlan, logits: torch.Tensor) -> None:
        """Treat the rows of a verification."""
        sanitize_nan_logits(logits, msg="DSPARK: target logits")

    def accepted(self, tokens: torch.Tensor) -> None:
        """Leave the tokens alone."""
