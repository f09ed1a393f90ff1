"""The verify policies: each makes a :class:`Choice` before anything is drafted, and a rule turns it into lengths."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from sglang_dspark.prefix_scheduler.lagged_survival import LaggedSurvivals
from sglang_dspark.prefix_scheduler.planner import Candidate, outlook
from sglang_dspark.prefix_scheduler.sps_table import Array
from sglang_dspark.prefix_scheduler.step_times import StepTimes

# A step that differs from the last one has to promise this much more throughput, and so has speculation over none:
# noise in the estimates must not move a server away from a choice that is as good.
MIN_GAIN = 0.01
# A server changes sides (parks, or speculates again) when the other side's advantage, summed over the steps it lasts,
# reaches this: at once when it is large, after a while when it is small.
SWITCH_AT = 0.08
# Parked: one request is drafted and verified in full every so many steps, to see whether the text got predictable; less
# often the further speculation is behind, by this share of the interval per this share of throughput.
PARKED_PROBE_STEPS = 24
PARKED_PROBE_GAP = 0.05
# A parked server sees little, so what it sees counts for more: rounds that a probe stands for.
PARKED_PROBE_WEIGHT = 4
# Speculating with a trimmed block: one request is verified in full every so many steps. What is never verified is
# never observed, and an under-confident head could not be corrected.
FULL_PROBE_STEPS = 48


class Rule(Enum):
    """How verify lengths follow from a choice and the live confidences."""

    UNIFORM = "uniform"
    TOP = "top"
    EARLY_STOP = "early-stop"
    THRESHOLD = "threshold"
    RANDOM = "random"


@dataclass(frozen=True)
class Choice:
    """What a policy decided before the step's noise is drawn.

    Attributes:
        rule: how lengths are found.
        depth: drafts proposed per request, 0 for a plain step.
        budget: drafts verified in all; for the rules UNIFORM and TOP.
        forced: request that is verified to the full depth whatever its survivals.
        only: request that is drafted alone; None drafts all.
        weight: rounds that a round of this step stands for in the statistics of survivals.
    """

    rule: Rule
    depth: int
    budget: int = 0
    forced: int | None = None
    only: int | None = None
    weight: int = 1


PLAIN = Choice(Rule.UNIFORM, depth=0)


class Policy(Protocol):
    """Decides what a step does.

    Attributes:
        name: as in the flag and in reports.
        needs_confidence: whether the drafter's confidences have to be computed.
    """

    needs_confidence: bool

    @property
    def name(self) -> str: ...

    def choose(self, requests: int, context: float) -> Choice:
        """Decide a step of ``requests`` requests with ``context`` tokens of context each on average."""

    def report(self) -> dict[str, Any]:
        """JSON for the statistics."""


@dataclass
class FixedPolicy:
    """``static``: the same number of drafts for every request in every step; ``off``: none."""

    verify_len: int
    name: str = "static"
    needs_confidence: bool = False

    def choose(self, requests: int, context: float) -> Choice:
        return Choice(Rule.UNIFORM, self.verify_len, self.verify_len * requests) if self.verify_len else PLAIN

    def report(self) -> dict[str, Any]:
        return {"verify_len": self.verify_len}


@dataclass
class LivePolicy:
    """``early-stop``, ``threshold`` and the test hook ``random``: whole blocks are drafted, lengths follow."""

    rule: Rule
    gamma: int
    threshold: float | None = None
    needs_confidence: bool = True

    @property
    def name(self) -> str:
        return self.rule.value

    def choose(self, requests: int, context: float) -> Choice:
        return Choice(self.rule, self.gamma)

    def report(self) -> dict[str, Any]:
        return {} if self.threshold is None else {"confidence_threshold": self.threshold}


@dataclass
class AutoPolicy:
    """``auto``: the fastest step by measured times and earlier survivals; a plain step where that is the fastest.

    Attributes:
        times, survivals: what it knows; both are fed from outside.
        parked: whether speculation rests because plain steps are faster.
    """

    times: StepTimes
    survivals: LaggedSurvivals
    name: str = "auto"
    needs_confidence: bool = True
    parked: bool = False
    _advantage: float = field(default=0.0, init=False)
    _since_probe: int = field(default=0, init=False)
    _probes: int = field(default=0, init=False)
    _depth: int = field(init=False)
    _drafts: float = field(init=False)
    _last: Candidate | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        # The incumbent of the first step is the whole block: trimming, too, has to earn its place.
        self._depth = self.times.table.gamma
        self._drafts = float(self._depth)

    def choose(self, requests: int, context: float) -> Choice:
        ahead = outlook(self.times, self.survivals, requests, context, self._depth, self._drafts)
        better = ahead.best.tokens_per_ms > (1 + MIN_GAIN) * ahead.incumbent.tokens_per_ms
        speculative = ahead.best if better else ahead.incumbent
        gain = math.log(speculative.tokens_per_ms / ahead.plain.tokens_per_ms)
        self._take_side(gain)
        self._since_probe += 1
        if self.parked:
            self._last = ahead.plain
            return self._parked_choice(requests, behind=max(0.0, -gain))
        self._last = speculative
        self._depth, self._drafts = speculative.depth, min(speculative.num_tokens / requests - 1, speculative.depth)
        return self._speculative_choice(requests, min(speculative.num_tokens - requests, requests * speculative.depth))

    def _take_side(self, gain: float) -> None:
        """Park, or speculate again, when the other side has been ahead by enough for long enough."""
        other_side = gain - MIN_GAIN if self.parked else -gain
        self._advantage = max(0.0, self._advantage + other_side)
        if self._advantage >= SWITCH_AT:
            self.parked = not self.parked
            self._advantage = 0.0

    def _parked_choice(self, requests: int, behind: float) -> Choice:
        if self._since_probe < PARKED_PROBE_STEPS * (1 + behind / PARKED_PROBE_GAP):
            return PLAIN
        depth, probed = self.times.table.gamma, self._next_probed(requests)
        return Choice(Rule.TOP, depth, depth, forced=probed, only=probed, weight=PARKED_PROBE_WEIGHT)

    def _speculative_choice(self, requests: int, budget: int) -> Choice:
        gamma = self.times.table.gamma
        if budget == requests * gamma or self._since_probe < FULL_PROBE_STEPS:
            return Choice(Rule.TOP, self._depth, budget)
        return Choice(Rule.TOP, gamma, min(budget + gamma, requests * gamma), forced=self._next_probed(requests))

    def _next_probed(self, requests: int) -> int:
        self._since_probe = 0
        self._probes += 1
        return self._probes % requests

    def report(self) -> dict[str, Any]:
        expected = None if self._last is None else self._last.tokens_per_ms * 1e3
        return {
            "parked": self.parked,
            "probes": self._probes,
            "expected_tokens_per_s": expected,
            "lagged_survival": self.survivals.mean().tolist(),
            "step_time": self.times.report(),
        }


def draft_depths(draft_ms: Array) -> tuple[int, ...]:
    """Block depths worth telling apart, given [requests, drafts, contexts] draft times: all, or only gamma."""
    gamma = draft_ms.shape[1] - 1
    shallow_is_cheaper = gamma > 1 and bool((draft_ms[:, 1:-1] < 0.98 * draft_ms[:, -1:]).any())
    return tuple(range(1, gamma + 1)) if shallow_is_cheaper else (gamma,)
