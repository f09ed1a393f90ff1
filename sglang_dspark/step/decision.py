"""The decision of a policy about a step, before anything is drafted, and the record of what came of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from dspark_kernels import FORCED, KIND_ROWS, Candidates, DraftBlock, PlanNumbers

from sglang_dspark.step.selection import FixedLength, FixedLens, SelectedDrafts, Selection, TopK
from sglang_dspark.step.state import Confidence, DecodeBatch, DraftOutput, RequestLimits, TargetOutput, VerifyPlan


@dataclass(frozen=True)
class StepDecision:
    """A decision about one step, made before the step's noise is drawn.

    Attributes:
        draft_len: drafts proposed per request, 0 for a non-speculative step.
        selection: which of them are verified.
        draft_requests: requests that are drafted, ascending; None drafts all.
        weight: rounds that this step's outcome stands for in what is learned.
        limits: what bounds the drafts of single requests, see :meth:`within`; None if nothing does.
        with_confidence: whether the drafter's confidences are computed.
        context: mean context tokens per request, which the decision was made for. All ranks of a server take rank 0's.
    """

    draft_len: int
    selection: Selection
    draft_requests: tuple[int, ...] | None = None
    weight: int = 1
    limits: RequestLimits | None = None
    with_confidence: bool = field(default=True, compare=False)
    context: float = field(default=0.0, compare=False)

    def draft_lens(self, requests: int) -> list[int]:
        """Return the drafts that are proposed for each of the step's requests."""
        if self.draft_requests is None:
            return [self.draft_len] * requests
        drafted = set(self.draft_requests)
        return [self.draft_len if request in drafted else 0 for request in range(requests)]

    def max_drafts(self, requests: int) -> int | None:
        """Return how many drafts are verified, at most if requests have bounds; None if only the device knows."""
        return self.selection.max_drafts(requests * self.draft_len)

    def longest(self, requests: int) -> int:
        """Return the most drafts that one request may verify, as far as the host knows."""
        drafts, most = self.max_drafts(requests), self.draft_len
        if self.limits is not None:
            most = max(self.limits.max_verify)
        return most if drafts is None else min(most, drafts)

    def is_fixed(self, requests: int) -> bool:
        """Return whether every request verifies its whole block, whatever the confidences."""
        if self.limits is not None or self.draft_requests is not None:
            return False
        return self.max_drafts(requests) == requests * self.draft_len

    @property
    def has_threshold(self) -> bool:
        """Return whether a request asks for a bound by confidence."""
        return self.limits is not None and self.limits.thresholds is not None

    def weighted(self, weights: Sequence[float] | None) -> StepDecision:
        """Return the same step with drafts ranked by weights too.

        Args:
            weights: of each request, above 0; None, or equal ones, leave the step as it is.
        """
        if weights is None or min(weights) == (most := max(weights)):
            return self
        return replace(self, selection=self.selection.weighted(tuple(weight / most for weight in weights)))

    def within(self, limits: RequestLimits | None) -> StepDecision:
        """Return the same step within what single requests ask for.

        Requests that may not verify anything are not drafted. What a request may not verify is left to others as far as
        the budget goes.

        Args:
            limits: None if no request asks for any.
        """
        if limits is None or self.draft_len == 0:
            return self
        allowed = limits.max_verify
        candidates = range(len(allowed)) if self.draft_requests is None else self.draft_requests
        drafted = tuple(r for r in candidates if allowed[r])
        if not drafted:
            return PLAIN
        max_verify = tuple(min(most, self.draft_len) if r in drafted else 0 for r, most in enumerate(allowed))
        bounds, left = limits.thresholds, sum(max_verify)
        thresholds = bounds if bounds is not None and any(bounds[r] for r in drafted) else None
        if left == len(candidates) * self.draft_len and thresholds is None:
            return self
        return replace(
            self,
            selection=self.selection.bounded(drafted, left),
            draft_requests=None if len(drafted) == len(allowed) else drafted,
            limits=RequestLimits(max_verify, thresholds),
        )

    def select(self, draft: DraftOutput) -> SelectedDrafts:
        """Return the drafts that are verified. Only :class:`~.selection.EarlyStop` waits for the device here."""
        if self.is_fixed(len(draft)):
            return FixedLens(self.draft_len, len(draft), draft.device)
        return self.selection.select(draft, self.limits)

    def plan_numbers(self, requests: int) -> PlanNumbers | None:
        """Return the plan kernel's arguments; None if requests have limits, or only some are drafted."""
        if self.is_fixed(requests):
            return PlanNumbers(verify_len=self.draft_len)
        if self.limits or self.draft_requests or not self.with_confidence:
            return None
        return self.selection.plan_numbers()


PLAIN = StepDecision(0, FixedLength())


FORCED_RANK = 2 * FORCED
"""What given drafts rank by: before any other, so that their ranks change no other draft's place."""


@dataclass
class ForcedRows(ABC):
    """Requests of a verification, alone or after those of a decode step.

    Attributes:
        step: the requests.
        tokens: [requests, depth] int64 their drafts.
        ranks: [requests, depth] float32, :data:`FORCED_RANK`, or below 0 for padding.
        num_drafts: those that are not padding.
        context: mean tokens before each request.
    """

    step: DecodeBatch
    tokens: torch.Tensor
    ranks: torch.Tensor
    num_drafts: int
    context: float

    @abstractmethod
    def joined(self, step: DecodeBatch) -> DecodeBatch:
        """Return a step of the requests of ``step``, and of these after them."""

    @abstractmethod
    def read(self, plan: VerifyPlan, target: TargetOutput, before: int) -> None:
        """Take what the target says of these rows, after so many requests of ``plan``, before it is overwritten."""


def drafted(tokens: torch.Tensor, ranks: torch.Tensor, num_drafts: int) -> tuple[DraftOutput, StepDecision]:
    """Return drafts [requests, depth], and that the ``num_drafts`` of highest rank are verified."""
    requests, depth = tokens.shape
    draft = DraftOutput(DraftBlock(tokens), Confidence(None, ranks), [depth] * requests)
    return draft, StepDecision(depth, TopK(num_drafts))


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
        num_drawn: drafts of a block that the drafter proposes at most, later ones are copied; None if none ever is.
        committed: [bs, width] int64 tokens that the step committed, -1 after them; on the host from the start.
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
    def from_text(self) -> list[int]:
        """Return the leading drafts of each request that go on with a chain of its own text."""
        return self._leading[0]

    @cached_property
    def from_cache(self) -> list[int]:
        """Return the leading drafts of each request that go on with a chain of an earlier answer."""
        return self._leading[1]

    @cached_property
    def from_request(self) -> list[int]:
        """Return the leading drafts of each request that go on with a chain that the request has asked for."""
        return self._leading[2]

    @cached_property
    def from_drafter(self) -> list[int]:
        """Return the drafts of each request that the drafter proposed: those that nothing has copied."""
        ends = [depth if self.num_drawn is None else min(depth, self.num_drawn) for depth in self.drafted]
        if not self.has_chain:
            return ends
        return [max(0, end - lead) for end, lead in zip(ends, self.from_request, strict=True)]

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
