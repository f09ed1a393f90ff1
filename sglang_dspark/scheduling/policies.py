"""The verify policies: each makes a :class:`Choice` before anything is drafted, and its rule turns it into lengths.

``auto`` has a module of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from sglang_dspark.scheduling.outcomes import Note
from sglang_dspark.step.choice import PLAIN, Choice, Rule

# The policy adaptive-block: steps whose acceptance counts, the share that whole blocks need, and the short block.
ADAPTIVE_WINDOW_STEPS = 4
ADAPTIVE_ACCEPTANCE = 0.40
ADAPTIVE_LOW_BLOCK = 4


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

    def observe(self, outcome: Note) -> None:  # noqa: B027 - a policy may look back, and most do not
        """Take note of a step that verified drafts of the drafter."""


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


@dataclass
class AdaptiveBlockPolicy(Policy):
    """``adaptive-block``: whole blocks while drafts are accepted, short ones while they are not.

    A simple rule of other engines, for comparison: it looks at the acceptance of the last few steps alone, whatever
    a step costs and however sure the drafter is of a draft.

    Attributes:
        gamma: drafts of a whole block.
    """

    gamma: int
    name: str = "adaptive-block"
    needs_confidence: bool = False
    _steps: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=ADAPTIVE_WINDOW_STEPS), init=False)

    def choose(self, requests: int, context: float) -> Choice:
        length = self.gamma if self.acceptance >= ADAPTIVE_ACCEPTANCE else min(ADAPTIVE_LOW_BLOCK, self.gamma)
        return Choice(Rule.UNIFORM, length)

    @property
    def acceptance(self) -> float:
        """Share of drafts accepted in the last steps; 1 before the first."""
        verified, accepted = (sum(step[part] for step in self._steps) for part in (0, 1))
        return accepted / verified if verified else 1.0

    def observe(self, outcome: Note) -> None:
        verified = sum(outcome.rounds.verified[request] for request in outcome.requests)
        self._steps.append((verified, sum(outcome.accept_lens)))

    def report(self) -> dict[str, Any]:
        return {"acceptance": self.acceptance}
