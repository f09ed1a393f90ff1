"""The verify policies: each makes a :class:`StepDecision` before anything is drafted.

``auto`` has a module of its own.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from sglang_dspark.scheduling.step_times import StepTimes
from sglang_dspark.step.decision import PLAIN, StepDecision
from sglang_dspark.step.selection import EarlyStop, FixedLength, Threshold


class Beside(NamedTuple):
    """Rows that a step verifies whatever it decides, such as those of prompts.

    Attributes:
        requests: as which they are laid out.
        rows: how many.
        context: mean tokens before each of the requests.
        bound_ms: of the step, as far as drafts are left out for it.
    """

    requests: int
    rows: int
    context: float
    bound_ms: float = inf

    def joined_context(self, requests: int, context: float) -> float:
        """Return the mean tokens before its requests and so many others, which have a mean of ``context``."""
        return (requests * context + self.requests * self.context) / (requests + self.requests)


class Policy(ABC):
    """Decides what a step does.

    Attributes:
        name: as in the flag and in reports.
        needs_confidence: whether the drafter's confidences have to be computed.
        parked: whether the server drafts nothing because plain steps are faster.
    """

    name: str
    needs_confidence: bool
    parked: bool = False

    @abstractmethod
    def choose(self, requests: int, context: float, beside: Beside | None = None) -> StepDecision:
        """Decide a step of ``requests`` requests with ``context`` tokens of context each on average.

        Args:
            beside: further rows of its verification, whose time a policy may count.
        """

    def report(self) -> dict[str, Any]:
        """Return JSON for the statistics."""
        return {}

    def affords(self, request: str, decision: StepDecision, context: float) -> bool:
        """Return whether a request that runs alone may take the step that was decided; if not, it takes a plain one."""
        return True


@dataclass
class FixedPolicy(Policy):
    """``static``: the same number of drafts for every request in every step; ``off``, or no drafter: none."""

    verify_len: int
    name: str = "static"
    needs_confidence: bool = False

    def choose(self, requests: int, context: float, beside: Beside | None = None) -> StepDecision:
        return StepDecision(self.verify_len, FixedLength()) if self.verify_len else PLAIN

    def report(self) -> dict[str, Any]:
        return {"verify_len": self.verify_len}


@dataclass
class ThresholdPolicy(Policy):
    """``threshold``: whole blocks are drafted, and verified up to the first draft of low confidence."""

    gamma: int
    threshold: float
    name: str = "threshold"
    needs_confidence: bool = True

    def choose(self, requests: int, context: float, beside: Beside | None = None) -> StepDecision:
        return StepDecision(self.gamma, Threshold(self.threshold))

    def report(self) -> dict[str, Any]:
        return {"confidence_threshold": self.threshold}


@dataclass
class EarlyStopPolicy(Policy):
    """``early-stop``: whole blocks are drafted, and Algorithm 1 of DSpark selects by the drafts' confidences."""

    gamma: int
    times: StepTimes
    name: str = "early-stop"
    needs_confidence: bool = True

    def choose(self, requests: int, context: float, beside: Beside | None = None) -> StepDecision:
        step_ms = self.times.by_drafts(requests, self.gamma, context)
        return StepDecision(self.gamma, EarlyStop(tuple(step_ms.tolist())))
