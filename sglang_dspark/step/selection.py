"""Rules by which verify lengths follow from drafts, and the drafts that they select.

No rule lets the value of a draft, or of a later one, decide about that draft.

A draft's survival is the probability that it and all drafts before it in its block are accepted: the running product of
the calibrated confidences (DSpark, Eq. 9). Survivals never grow along a block, so ranking them respects prefixes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from dspark_kernels import FORCED, PlanNumbers, StepRequests, VerifyRows, plan_top, plan_uniform
from numpy.typing import NDArray

from sglang_dspark.step.packed import host_floats, host_index
from sglang_dspark.step.state import DraftOutput, RequestLimits, VerifyPlan


@dataclass(frozen=True)
class FixedLens:
    """The first ``verify_len`` drafts of every request."""

    verify_len: int
    requests: int
    device: torch.device

    @property
    def synced(self) -> None:
        """Return None: the host has decided."""

    @property
    def verify_lens(self) -> torch.Tensor:
        """Return [bs] int64 drafts verified per request."""
        return torch.full((self.requests,), self.verify_len, device=self.device)

    def rows(self, requests: StepRequests, tokens: torch.Tensor, into: VerifyPlan | None) -> VerifyRows:
        """Flatten the tokens, see :func:`build_plan`."""
        room = len(requests) * (self.verify_len + 1) if into is None else len(into.input_ids)
        return plan_uniform(self.verify_len, tokens, requests, room, into)


@dataclass(frozen=True)
class TopDrafts:
    """The drafts that rank highest; how many at most was fixed before any of them was drawn.

    Attributes:
        order: [bs, width] float32 what drafts rank by, non-increasing along a row; negative ones are never verified.
        budget: drafts verified in all.
        row_count_known: whether exactly ``budget`` drafts are verified; not by live confidences.
    """

    order: torch.Tensor
    budget: int
    row_count_known: bool = True

    @classmethod
    def of_lengths(cls, lens: torch.Tensor, depth: int) -> TopDrafts:
        """Return the first ``lens`` [bs] of ``depth`` drafts of each request, for a rule over live confidences."""
        order = torch.where(torch.arange(depth, device=lens.device) < lens[:, None], 1.0, -1.0)
        return cls(order, order.numel(), row_count_known=False)

    @property
    def synced(self) -> torch.Tensor:
        """Return the tensor that determines the plan on the device; rank 0 broadcasts it."""
        return self.order

    @property
    def verify_lens(self) -> torch.Tensor:
        """Return [bs] int64 drafts verified per request."""
        return top_prefixes(self.order, self.budget)

    def rows(self, requests: StepRequests, tokens: torch.Tensor, into: VerifyPlan | None) -> VerifyRows:
        """Flatten the tokens, see :func:`build_plan`."""
        if into is not None:
            room = len(into.input_ids)
        elif self.row_count_known:
            room = len(requests) + self.budget
        else:
            room = len(requests) + int(self.verify_lens.sum())  # waits for the device
        return plan_top(self.order, self.budget, tokens, requests, room, into)


SelectedDrafts = FixedLens | TopDrafts


def build_plan(
    requests: StepRequests, tokens: torch.Tensor, selected: SelectedDrafts, into: VerifyPlan | None = None
) -> VerifyPlan:
    """Flatten the anchors and the selected drafts, request by request.

    No host sync, unless only the device knows how many there are.

    Args:
        tokens: [bs, depth] int64 the drafts.
        into: buffers of a tier that has room for them; rows after the last token are padding. By default the batch has
            exactly the rows that it needs.
    """
    rows = selected.rows(requests, tokens, into)
    if into is not None:
        return into
    longest = selected.verify_len if isinstance(selected, FixedLens) else tokens.shape[1]
    return VerifyPlan.of(rows, longest + 1)


def top_prefixes(survival: torch.Tensor, budget: int) -> torch.Tensor:
    """Return verify lengths [bs] int64, 0..depth, of the ``budget`` drafts with the largest survivals. No host sync.

    Ties go to the smaller position, then to the smaller request: otherwise a draft could be admitted without its
    predecessor, or by its own value. Whether draft (r, j) is admitted depends on no later draft of its block, because
    these rank after it, and the budget was fixed before the block was drawn.

    Args:
        survival: [bs, depth], non-increasing along a row; entries above 1 are admitted first, negative ones never.
        budget: drafts to admit; at most bs * depth.
    """
    bs, depth = survival.shape
    # Laid out position by position, a stable sort breaks ties in the order stated above.
    ranked = survival.T.reshape(-1).sort(descending=True, stable=True)
    admitted = torch.zeros(depth * bs, dtype=torch.int64, device=survival.device)
    admitted.index_fill_(0, ranked.indices[:budget], 1)  # an assignment would copy the 1 from the host, and wait
    return (admitted.view(depth, bs) * (survival.T >= 0)).sum(0)


_EXCLUDED = -1.0
"""Survival of a draft that must not be verified."""


class Selection(ABC):
    """A rule that is fixed before the step's noise is drawn.

    Attributes:
        probe_request: request that is verified in full, whatever its survivals; None for none.
        weights: what drafts of each request count, where the rule ranks by that; None if all count alike.
    """

    probe_request: int | None = None
    weights: tuple[float, ...] | None = None

    def weighted(self, weights: tuple[float, ...]) -> Selection:
        """Return the rule with these weights; the rule itself if it does not rank drafts by survivals."""
        return self

    @abstractmethod
    def max_drafts(self, drafts: int) -> int | None:
        """Return the most of ``drafts`` proposed drafts that are verified; None if only the device knows."""

    @abstractmethod
    def bounded(self, drafted: Sequence[int], num_drafts: int) -> Selection:
        """Return the rule for a step in which some requests have bounds.

        Args:
            drafted: requests that are drafted.
            num_drafts: drafts that may be verified in all.
        """

    @abstractmethod
    def select(self, draft: DraftOutput, limits: RequestLimits | None) -> SelectedDrafts:
        """Return the drafts that are verified.

        Args:
            limits: cut to what the step drafts; None if no request asks for any.
        """

    def plan_numbers(self) -> PlanNumbers | None:
        """Return the plan kernel's arguments for all requests; None if the plan cannot be captured."""
        return None


@dataclass(frozen=True)
class FixedLength(Selection):
    """Verifies the whole block of every request."""

    def max_drafts(self, drafts: int) -> int:
        return drafts

    def bounded(self, drafted: Sequence[int], num_drafts: int) -> Selection:
        return TopK(num_drafts)

    def select(self, draft: DraftOutput, limits: RequestLimits | None) -> SelectedDrafts:
        raise AssertionError("whole blocks need no selection, and bounded ones have another rule")


@dataclass(frozen=True)
class TopK(Selection):
    """The drafts with the largest survivals are verified.

    Attributes:
        budget: drafts verified in all.
        weights: of each request, above 0 and at most 1: drafts rank by their survival times this. None counts all
            alike.
    """

    budget: int
    probe_request: int | None = None
    weights: tuple[float, ...] | None = None

    def weighted(self, weights: tuple[float, ...]) -> Selection:
        return replace(self, weights=weights)

    def max_drafts(self, drafts: int) -> int:
        return self.budget

    def bounded(self, drafted: Sequence[int], num_drafts: int) -> Selection:
        probed = self.probe_request if self.probe_request in drafted else None
        return replace(self, budget=min(self.budget, num_drafts), probe_request=probed)

    def select(self, draft: DraftOutput, limits: RequestLimits | None) -> SelectedDrafts:
        most = None if limits is None else _most(limits, draft)
        row_count_known = limits is None or limits.thresholds is None
        return TopDrafts(_up_to(most, self._order(draft)), self.budget, row_count_known)

    def _order(self, draft: DraftOutput) -> torch.Tensor:
        """Return [bs, depth] what drafts rank by."""
        tokens, device = draft.block.tokens, draft.device
        # A policy without confidences ranks drafts only to keep them within limits, which leave no decision.
        survival = torch.ones(tokens.shape, device=device) if draft.confidence is None else draft.survival
        if self.weights is not None:
            survival = survival * host_floats(self.weights, device)[:, None]
        if left_out := [request for request, length in enumerate(draft.draft_lens) if length == 0]:
            survival = survival.index_fill(0, host_index(left_out, device), _EXCLUDED)
        if self.probe_request is not None:
            survival = survival.clone()
            survival[self.probe_request] = FORCED
        return survival

    def plan_numbers(self) -> PlanNumbers:
        return PlanNumbers(self.budget, forced=-1 if self.probe_request is None else self.probe_request)


class _LiveRule(Selection):
    """A rule over live confidences, which gives each request its length; only the device knows their sum."""

    def max_drafts(self, drafts: int) -> None:
        return None

    def bounded(self, drafted: Sequence[int], num_drafts: int) -> Selection:
        return self


@dataclass(frozen=True)
class EarlyStop(_LiveRule):
    """Admits drafts with Algorithm 1 of DSpark: best first while the expected throughput grows.

    Attributes:
        step_ms: [bs * draft_len + 1] predicted time of a step that verifies so many drafts.
    """

    step_ms: tuple[float, ...]

    def select(self, draft: DraftOutput, limits: RequestLimits | None) -> SelectedDrafts:
        """Return the lengths of :func:`early_stop`, which reads the survivals on the host."""
        survival = _up_to(None if limits is None else _most(limits, draft), draft.survival)
        lens = early_stop(survival.double().cpu().numpy(), np.array(self.step_ms))
        return TopDrafts.of_lengths(torch.tensor(lens, device=survival.device), survival.shape[1])


@dataclass(frozen=True)
class Threshold(_LiveRule):
    """Verifies drafts up to the first one whose raw confidence lies below ``confidence`` (DSpark, 4.4)."""

    confidence: float

    def select(self, draft: DraftOutput, limits: RequestLimits | None) -> SelectedDrafts:
        lens = above_threshold(draft.raw_confidence, self.confidence)
        lens = lens if limits is None else torch.minimum(lens, _most(limits, draft))
        return TopDrafts.of_lengths(lens, draft.block.tokens.shape[1])


def _most(limits: RequestLimits, draft: DraftOutput) -> torch.Tensor:
    """Return [bs] int64 leading drafts of a block that ``limits`` let be verified, cut to what the step drafts."""
    most = host_index(limits.max_verify, draft.device)
    if limits.thresholds is None:
        return most
    bounds = host_floats(limits.thresholds, draft.device)[:, None]
    return torch.minimum(most, above_threshold(draft.raw_confidence, bounds))


def _up_to(most: torch.Tensor | None, survival: torch.Tensor) -> torch.Tensor:
    """Return [bs, depth] what drafts rank by; those past the first ``most`` [bs] of a block never are verified."""
    if most is None:
        return survival
    slots = torch.arange(survival.shape[1], device=survival.device)
    return survival.masked_fill(slots >= most[:, None], _EXCLUDED)


def early_stop(survival: NDArray[np.float64], step_ms: NDArray[np.float64]) -> list[int]:
    """Return verify lengths, as DSpark's Algorithm 1 (3.2.2): admit drafts best first while expected throughput grows.

    Stopping at the first candidate that does not improve is what keeps the output exact: a search over all lengths
    would let a draft's own value decide about it (DSpark, Appendix A).

    Args:
        survival: [bs, depth] live survivals.
        step_ms: [bs * depth + 1] time of a step that verifies that many drafts.
    """
    bs = len(survival)
    # As in top_prefixes: ties to the smaller position, then to the smaller request.
    by_position = survival.T.reshape(-1)
    order = np.argsort(-by_position, kind="stable")
    expected = bs + np.cumsum(by_position[order])
    rates = np.concatenate([[bs / step_ms[0]], expected / step_ms[1:]])
    worse = np.flatnonzero((rates[1:] <= rates[:-1]) | (by_position[order] <= 0))
    admitted = int(worse[0]) if len(worse) else len(order)
    return np.bincount(order[:admitted] % bs, minlength=bs).tolist()


def above_threshold(confidence: torch.Tensor, threshold: float | torch.Tensor) -> torch.Tensor:
    """Return [bs] int64 drafts before the first one whose confidence lies below ``threshold`` (DSpark, 4.4).

    The confidence of a draft is known before the draft is drawn, so it may decide about it. No host sync.

    Args:
        confidence: [bs, depth] per-step acceptance probabilities.
        threshold: one for all, or one per request, [bs, 1].
    """
    return (confidence >= threshold).to(torch.int64).cumprod(1).sum(1)
