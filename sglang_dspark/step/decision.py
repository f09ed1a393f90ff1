"""The decision of a policy about a step, before anything is drafted.

Rows of a verification whose tokens are given: none of them is drawn or accepted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from dspark_kernels import FORCED, DraftBlock, PlanNumbers

from sglang_dspark.step.selection import FixedLength, FixedLens, SelectedDrafts, Selection, TopK
from sglang_dspark.step.state import Confidence, DecodeBatch, DraftOutput, RequestLimits, TargetOutput, VerifyPlan


@dataclass(frozen=True)
class StepDecision:
    """A decision about one step, made before the step's noise is drawn.

    Attributes:
        draft_len: drafts proposed per request, 0 for a plain step.
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


FIRST = 2 * FORCED
"""What given drafts rank by: before any other, so that their ranks change no other draft's place."""


@dataclass
class GivenRows(ABC):
    """Requests of a verification, alone or behind those of a decode step.

    Attributes:
        step: the requests.
        tokens: [requests, depth] int64 their drafts.
        ranks: [requests, depth] float32, :data:`FIRST`, or below 0 of fillers.
        num_drafts: those that are no fillers.
        context: mean tokens before each request.
    """

    step: DecodeBatch
    tokens: torch.Tensor
    ranks: torch.Tensor
    num_drafts: int
    context: float

    @abstractmethod
    def joined(self, step: DecodeBatch) -> DecodeBatch:
        """Return a step of the requests of ``step``, and of these behind them."""

    @abstractmethod
    def read(self, plan: VerifyPlan, target: TargetOutput, before: int) -> None:
        """Take what the target says of these rows, behind so many requests of ``plan``, before it is overwritten."""


def drafted(tokens: torch.Tensor, ranks: torch.Tensor, num_drafts: int) -> tuple[DraftOutput, StepDecision]:
    """Return drafts [requests, depth], and that the ``num_drafts`` of highest rank are verified."""
    requests, depth = tokens.shape
    draft = DraftOutput(DraftBlock(tokens), Confidence(None, ranks), [depth] * requests)
    return draft, StepDecision(depth, TopK(num_drafts))
