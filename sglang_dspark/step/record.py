"""Record a decode step for statistics, calibration and traces."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from dspark_kernels import KIND_ROWS, Candidates

from sglang_dspark.step.decision import StepDecision
from sglang_dspark.step.state import Confidence


@dataclass(frozen=True)
class TimedStep:
    """A step of so many requests: how long it took, and what was expected; None without measured step times."""

    requests: int
    measured_ms: float
    expected_ms: float | None


@dataclass(frozen=True)
class StepRecord:
    """The record of a step for statistics, calibration and traces. Tensors are on the host when SGLang has the result.

    Attributes:
        requests: ids of the step's requests.
        decision: what the policy had decided.
        drafted: drafts of each request's block, copied ones included; none on a server without a drafter.
        verify_lens: [bs] int64, drafts verified per request.
        confidence: as in :class:`~.state.DraftOutput`.
        traced: [bs, 2 + depth] int64: context length, anchor and drafts; None when no request wants a trace.
        chains: [bs, 2 + m] int64 of :class:`dspark_kernels.Candidates`; None without.
        num_drawn: drafts of a block that the drafter proposes at most, those behind are copied; None if none ever is.
        committed: [bs, width] int64 tokens that the step committed, -1 behind them; on the host from the start.
        policy, parked: name of the policy that chose, and whether it let speculation rest.
        behind: the step before, as it was measured when this one was chosen; None if it could not be.
    """

    requests: list[str]
    decision: StepDecision
    drafted: list[int]
    verify_lens: torch.Tensor
    confidence: Confidence | None
    traced: torch.Tensor | None
    chains: torch.Tensor | None = None
    num_drawn: int | None = None
    committed: torch.Tensor | None = None
    policy: str = "auto"
    parked: bool = False
    behind: TimedStep | None = None

    @cached_property
    def verified(self) -> list[int]:
        """Return ``verify_lens``, once they are on the host."""
        return self.verify_lens.tolist()

    @cached_property
    def followed(self) -> list[int]:
        """Return the leading drafts of each request that go on with a chain of its own text."""
        return self._leading[0]

    @cached_property
    def cached(self) -> list[int]:
        """Return the leading drafts of each request that go on with a chain of an earlier answer."""
        return self._leading[1]

    @cached_property
    def copied(self) -> list[int]:
        """Return the leading drafts of each request that go on with a chain that the request has asked for."""
        return self._leading[2]

    @cached_property
    def drawn(self) -> list[int]:
        """Return the drafts of each request that the drafter proposed: those that nothing has copied."""
        ends = [depth if self.num_drawn is None else min(depth, self.num_drawn) for depth in self.drafted]
        if not self.has_chain:
            return ends
        return [max(0, end - lead) for end, lead in zip(ends, self.copied, strict=True)]

    @cached_property
    def has_chain(self) -> bool:
        """Return whether any request had candidates, once chains are on the host."""
        return self.chains is not None and bool(Candidates.parts(self.chains.numpy())[0].any())

    @cached_property
    def from_answers(self) -> list[bool]:
        """Return whether the chain of each request is of an earlier answer, once chains are on the host."""
        if self.chains is None:
            return [False] * len(self.requests)
        return (Candidates.parts(self.chains.numpy())[0] // KIND_ROWS == 1).tolist()

    @cached_property
    def _leading(self) -> list[list[int]]:
        """[3, bs], once chains are on the host."""
        if self.chains is None or not self.has_chain:
            return [[0] * len(self.requests)] * 3
        rows, followed, _ = Candidates.parts(self.chains.numpy())
        leading = np.zeros((3, len(rows)), np.int64)
        leading[rows // KIND_ROWS, np.arange(len(rows))] = followed
        return [kind.tolist() for kind in leading]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Return lengths, traces, chains, logits and survivals, as far as the step has them."""
        return [tensor for tensor in self._tensors if tensor is not None]

    @property
    def _tensors(self) -> list[torch.Tensor | None]:
        confidence = self.confidence
        scores = (None, None) if confidence is None else (confidence.logits, confidence.survival)
        return [self.verify_lens, self.traced, self.chains, *scores]

    def of(self, tensors: Iterable[torch.Tensor], committed: torch.Tensor | None = None) -> StepRecord:
        """Return the same record with other :attr:`tensors`, and what the step committed."""
        parts = iter(tensors)
        found = [None if tensor is None else next(parts) for tensor in self._tensors]
        verify_lens, traced, chains, logits, survival = found
        assert verify_lens is not None, "every step verifies"
        confidence = None if survival is None else Confidence(logits, survival)
        return replace(
            self,
            verify_lens=verify_lens,
            traced=traced,
            chains=chains,
            committed=committed,
            confidence=confidence,
        )
