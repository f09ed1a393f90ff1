"""The verify policies: each makes a :class:`Choice` before anything is drafted, and its rule turns it into lengths.

``auto`` has a module of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from sglang_dspark.step.choice import PLAIN, Choice, Rule


class Policy(ABC):
    """Decides what a step does.

    Attributes:
        needs_confidence: whether the drafter's confidences have to be computed.
        parked: whether speculation rests because plain steps are faster.
        probing: whether the last choice serves to learn something.
    """

    needs_confidence: bool
    parked: bool = False
    probing: bool = False

    @property
    @abstractmethod
    def name(self) -> str:
        """As in the flag and in reports."""

    @abstractmethod
    def choose(self, requests: int, context: float) -> Choice:
        """Decide a step of ``requests`` requests with ``context`` tokens of context each on average."""

    @abstractmethod
    def report(self) -> dict[str, Any]:
        """JSON for the statistics."""

    def resumed(self, requests: int) -> Choice:
        """The step that speculation would take now, where it rests."""
        return PLAIN

    def least_gain(self, requests: int, depth: int, context: float) -> float:
        """Accepted drafts that a request must bring per round, or it is not drafted; 0 drafts them all."""
        return 0.0


@dataclass
class FixedPolicy(Policy):
    """``static``: the same number of drafts for every request in every step; ``off``, or no drafter: none."""

    verify_len: int
    name: str = "static"
    needs_confidence: bool = False

    def choose(self, requests: int, context: float) -> Choice:
        return Choice(Rule.UNIFORM, self.verify_len) if self.verify_len else PLAIN

    def report(self) -> dict[str, Any]:
        return {"verify_len": self.verify_len}


@dataclass
class LivePolicy(Policy):
    """``early-stop`` and ``threshold``: whole blocks are drafted, lengths follow from the drafts' confidences."""

    rule: Rule
    gamma: int
    threshold: float | None = None
    needs_confidence: bool = field(default=True, init=False)

    @property
    def name(self) -> str:
        return self.rule.value

    def choose(self, requests: int, context: float) -> Choice:
        return Choice(self.rule, self.gamma)

    def report(self) -> dict[str, Any]:
        return {} if self.threshold is None else {"confidence_threshold": self.threshold}
