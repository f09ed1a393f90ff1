"""The drafts of a step that are verified, and the flattened tokens of their verification."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from dspark_kernels import StepRequests, VerifyRows, plan_top, plan_uniform

from sglang_dspark.step.state import VerifyPlan


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
        """Return the first ``lens`` [bs] of ``depth`` drafts of each request, by a rule over live confidences."""
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
        into: buffers of a tier that has room for them; rows behind the last token are padding. By default the batch has
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
    these rank behind it, and the budget was fixed before the block was drawn.

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
