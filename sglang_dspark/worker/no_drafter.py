"""A server without a drafter."""

from __future__ import annotations

import logging
from typing import Any

import torch
from dspark_kernels import AcceptResult, Candidates, DraftBlock

from sglang_dspark.config import DSparkConfig
from sglang_dspark.engine.part import CandidateSource
from sglang_dspark.step.state import DecodeBatch, VerifyPlan

logger = logging.getLogger(__name__)


class NoDrafter:
    """A server without a drafter: steps are plain but for the candidates that requests name.

    There is no draft K/V, and nothing is read from the target's layers.
    """

    num_drawn = held = 0
    proposed = None
    mask_token_id = 0  # of staged blocks that are not read

    def __init__(
        self,
        options: DSparkConfig,
        vocab_size: int,
        device: torch.device,
        candidates: CandidateSource | None = None,
    ) -> None:
        self.candidates = candidates
        self.gamma = self.num_slots = options.gamma(None)
        self._vocab_size, self._device = vocab_size, device
        logger.info("DSPARK: no drafter; requests that name a text speculate")

    def follow_target(self) -> None:
        """Do nothing: nothing is read from the target."""

    def settle(self) -> None:
        """Do nothing: no row is held."""

    hold_rows = forget_held = settle

    def committed(self, plan: VerifyPlan) -> None:
        """Do nothing: no row is held."""

    def allocate(self, num_slots: int, dtype: torch.dtype) -> None:
        """Make room for the tokens of the slots: there is no K/V."""
        self._tokens = torch.full((num_slots,), -1, device=self._device)

    def calibration(self, options: DSparkConfig, max_verify: int) -> None:
        """Return None: there is nothing to calibrate."""

    def propose(self, step: DecodeBatch, depth: int, *_given: Any) -> DraftBlock:
        """Return the candidates that requests have named."""
        if self.candidates is None:
            chains = Candidates.no_chains(len(step), depth, self._device)
        else:
            chains = self.candidates.find(step, self._tokens, depth)
        return DraftBlock.of_chains(chains, depth)

    def drafts_for(self, req: Any) -> bool:
        """Return whether SGLang's request names candidates."""
        return self.candidates is not None and self.candidates.names_drafts(req)

    def commit(self, plan: VerifyPlan, accepted: AcceptResult, captured: torch.Tensor) -> None:
        """Keep the tokens alone: the target's K/V is all there is."""
        self._tokens[plan.slots] = plan.input_ids

    def remember(self, tokens: torch.Tensor, slots: torch.Tensor) -> None:
        """Keep tokens [n] of requests' texts with their slots [n]; those of pictures have ids of no vocabulary."""
        self._tokens[slots] = torch.where(tokens < self._vocab_size, tokens, -1)

    def inject(self, *rows: Any) -> None:
        """Write nothing: there is no K/V."""

    def describe(self) -> None:
        """Return None: there is no checkpoint."""
