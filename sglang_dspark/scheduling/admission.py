"""Which drafts of a step are verified: from a choice, and what is known of the drafts, to what the plan lays out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_dspark.scheduling.ranking import Bounds, ranked
from sglang_dspark.scheduling.selection import above_threshold, early_stop, top_prefixes
from sglang_dspark.scheduling.step_times import StepTimes
from sglang_dspark.step.choice import Choice, Rule
from sglang_dspark.step.state import Drafted


@dataclass(frozen=True)
class Uniform:
    """Every request verifies its first ``verify_len`` drafts, whatever the confidences."""

    verify_len: int
    requests: int
    device: torch.device

    @property
    def decisive(self) -> None:
        """The choice decides alone, and nothing on the device does."""

    @property
    def verify_lens(self) -> torch.Tensor:
        """[bs] int64 drafts verified per request."""
        return torch.full((self.requests,), self.verify_len, device=self.device)


@dataclass(frozen=True)
class Best:
    """The drafts that rank highest are verified; how many at most was fixed before any of them was drawn.

    Attributes:
        order: [bs, width] float32 what drafts rank by, non-increasing along a row; negative ones are never verified.
        budget: drafts verified in all.
        exact: whether ``budget`` drafts are verified for certain, so that the number of rows is known without asking
            the device; not where a request has a bound by confidence.
    """

    order: torch.Tensor
    budget: int
    exact: bool = True

    @property
    def decisive(self) -> torch.Tensor:
        """What decides on the device: all ranks of a server have to take the same."""
        return self.order

    @property
    def verify_lens(self) -> torch.Tensor:
        """[bs] int64 drafts verified per request."""
        return top_prefixes(self.order, self.budget)


@dataclass(frozen=True)
class Lengths:
    """A rule over live confidences gave each request its length, and only the device knows their sum.

    Attributes:
        verify_lens: [bs] int64 drafts verified per request.
    """

    verify_lens: torch.Tensor

    @property
    def decisive(self) -> torch.Tensor:
        """What decides on the device: all ranks of a server have to take the same."""
        return self.verify_lens


Admitted = Uniform | Best | Lengths


def admit(choice: Choice, drafted: Drafted, threshold: float | None, times: StepTimes | None) -> Admitted:
    """The drafts that ``choice`` verifies.

    Only the rule EARLY_STOP waits for the device here. How many rows its lengths and those of THRESHOLD need, the
    layout has to wait for.

    Args:
        threshold: of the rule THRESHOLD.
        times: measured step times, for the rule EARLY_STOP.
    """
    if choice.is_uniform(len(drafted)):
        return Uniform(choice.depth, len(drafted), drafted.device)
    if choice.rule is Rule.TOP:
        return Best(ranked(choice, drafted), choice.budget, exact=not choice.needs_confidence)
    bounds = None if choice.limits is None else Bounds.of(choice.limits, drafted)
    if choice.rule is Rule.THRESHOLD:
        assert threshold is not None, "the policy was made with one"
        lens = above_threshold(drafted.raw_confidence, threshold)
    else:
        assert times is not None, "the policy was made with measured step times"
        step_ms = times.by_drafts(len(drafted), choice.depth, choice.context)
        lens = _stopped_early(drafted.survival if bounds is None else bounds.drafted(drafted.survival), step_ms)
    return Lengths(lens if bounds is None else bounds.cut(lens))


def _stopped_early(survival: torch.Tensor, step_ms: NDArray[np.float64]) -> torch.Tensor:
    """[bs] int64 lengths of Algorithm 1, which reads the survivals on the host."""
    return torch.tensor(early_stop(survival.double().cpu().numpy(), step_ms), device=survival.device)
