"""The verify policies: each makes a :class:`Choice` before anything is drafted, and a rule turns it into lengths."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Protocol

import numpy as np

from sglang_dspark.prefix_scheduler.lagged_survival import LaggedSurvivals
from sglang_dspark.prefix_scheduler.limits import Limits
from sglang_dspark.prefix_scheduler.planner import Candidate, Outlook, by_drafts, outlook
from sglang_dspark.prefix_scheduler.sps_table import Array
from sglang_dspark.prefix_scheduler.step_times import StepTimes

# A step that differs from the last one has to promise this much more throughput, and so has speculation over none:
# noise in the estimates must not move a server away from a choice that is as good.
MIN_GAIN = 0.01
# A server changes sides (parks, or speculates again) when the other side's advantage, summed over the steps it lasts,
# reaches this: at once when it is large, after a while when it is small.
SWITCH_AT = 0.08
# But not before it has seen this many rounds: what is known of a drafter before that is a guess.
FIRST_LOOK_ROUNDS = 64
# Steps that an outlook holds for: what it is made of changes slowly, survivals once in so many steps, and making it is
# most of the work of a choice.
OUTLOOK_STEPS = 8
# Now and then a step serves to learn something (a probe): after so many steps, and not before all that the last probe
# cost is at most this share of the throughput since.
PROBE_STEPS = 32
PROBE_SHARE = 0.01
# A step that nobody takes is timed now and then if it may be the fastest within so many standard deviations.
DOUBT = 2.0
# A parked server sees little, so what it sees counts for more: rounds that a probe stands for.
PARKED_PROBE_WEIGHT = 4
# The policy adaptive-block: steps whose acceptance counts, the share that whole blocks need, and the short block.
ADAPTIVE_WINDOW_STEPS = 4
ADAPTIVE_ACCEPTANCE = 0.40
ADAPTIVE_LOW_BLOCK = 4


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
        drafted: requests that are drafted, ascending; None drafts all.
        weight: rounds that a round of this step stands for in the statistics of survivals.
        limits: what requests ask for themselves, see :meth:`within`; None when nobody asks for anything.
    """

    rule: Rule
    depth: int
    budget: int = 0
    forced: int | None = None
    drafted: tuple[int, ...] | None = None
    weight: int = 1
    limits: Limits | None = None

    def is_uniform(self, requests: int) -> bool:
        """Whether every request verifies its whole block, whatever the confidences."""
        whole = self.rule is Rule.TOP and self.drafted is None and self.budget == requests * self.depth
        return self.limits is None and (whole or self.rule is Rule.UNIFORM)

    @property
    def singles_out(self) -> bool:
        """Whether drafts are ranked by more than their survivals."""
        return self.forced is not None or self.drafted is not None or self.limits is not None

    @property
    def needs_confidence(self) -> bool:
        """Whether a request asks for a bound by confidence."""
        return self.limits is not None and self.limits.thresholds is not None

    @property
    def has_copies(self) -> bool:
        """Whether presets propose drafts of this step."""
        return self.limits is not None and any(self.limits.copied)

    @property
    def fixes_total(self) -> bool:
        """Whether ``budget`` is exactly what is verified, known before the drafts are."""
        return self.rule is Rule.TOP and not self.needs_confidence

    def within(self, limits: Limits) -> Choice:
        """The same step with what single requests ask for.

        Requests that may not verify anything, and those with copied drafts, are not drafted. What a request may not
        verify is left to others as far as the budget goes; copied drafts come on top of the budget.
        """
        requests, copied = len(limits.most), sum(limits.copied)
        candidates = range(requests if self.depth else 0) if self.drafted is None else self.drafted
        drafted = tuple(r for r in candidates if limits.most[r] and not limits.copied[r])
        if not drafted and not copied:
            return PLAIN
        depth = self.depth if drafted else 0
        most = tuple(limits.copied[r] or (min(limits.most[r], depth) if r in drafted else 0) for r in range(requests))
        left = sum(most) - copied
        bounds = limits.thresholds
        thresholds = bounds if bounds is not None and any(bounds[r] for r in drafted) else None
        if not copied and left == len(candidates) * depth and thresholds is None:
            return self
        live = drafted and self.rule not in (Rule.UNIFORM, Rule.TOP)
        return replace(
            self,
            rule=self.rule if live else Rule.TOP,
            depth=depth,
            budget=(min(self.budget, left) if self.rule is Rule.TOP else left) + copied,
            forced=self.forced if self.forced in drafted else None,
            drafted=None if len(drafted) == requests else drafted,
            limits=Limits(most, limits.copied, thresholds),
        )

    def for_some(self, drafted: Sequence[int], requests: int) -> Choice:
        """The same step with only ``drafted`` of the ``requests`` requests drafted."""
        if len(drafted) == requests:
            return self
        if not drafted:
            return PLAIN
        return replace(self, drafted=tuple(drafted), budget=min(self.budget, len(drafted) * self.depth))


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
class AdaptiveBlockPolicy:
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
        return Choice(Rule.UNIFORM, length, length * requests)

    @property
    def acceptance(self) -> float:
        """Share of drafts accepted in the last steps; 1 before the first."""
        verified, accepted = (sum(step[part] for step in self._steps) for part in (0, 1))
        return accepted / verified if verified else 1.0

    def observe(self, verified: int, accepted: int) -> None:
        """Add a step that verified drafts of the drafter, all requests together."""
        self._steps.append((verified, accepted))

    def report(self) -> dict[str, Any]:
        return {"acceptance": self.acceptance}


@dataclass
class _Held:
    """What is known of steps with a number of requests, for the next few of them.

    Attributes:
        made: step at which it was found out.
        share_ms: milliseconds of the draft stage that the last request adds, by depth.
    """

    made: int
    outlook: Outlook
    share_ms: dict[int, float] = field(default_factory=dict)


@dataclass
class AutoPolicy:
    """``auto``: the fastest step by measured times and earlier survivals; a plain step where that is the fastest.

    Attributes:
        times, survivals: what it knows; both are fed from outside.
        whole_batches: whether a step that drafts for one request drafts for all, as CUDA graphs do.
        parked: whether speculation rests because plain steps are faster.
    """

    times: StepTimes
    survivals: LaggedSurvivals
    whole_batches: bool = False
    name: str = "auto"
    needs_confidence: bool = True
    parked: bool = False
    _held: dict[int, _Held] = field(default_factory=dict, init=False)
    _steps: int = field(default=0, init=False)
    _advantage: float = field(default=0.0, init=False)
    _steps_to_probe: float = field(default=PROBE_STEPS, init=False)
    _probes: int = field(default=0, init=False)
    _depth: int = field(init=False)
    _drafts: float = field(init=False)
    _last: Candidate | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        # The incumbent of the first step is the whole block: trimming, too, has to earn its place.
        self._depth = self.times.table.gamma
        self._drafts = float(self._depth)

    def choose(self, requests: int, context: float) -> Choice:
        ahead = self._outlook(requests, context)
        better = ahead.best.tokens_per_ms > (1 + MIN_GAIN) * ahead.incumbent.tokens_per_ms
        speculative = ahead.best if better else ahead.incumbent
        gain = math.log(speculative.tokens_per_ms / ahead.plain.tokens_per_ms)
        self._take_side(gain)
        self._last = ahead.plain if self.parked else speculative
        if not self.parked:
            self._depth, self._drafts = speculative.depth, min(speculative.num_tokens / requests - 1, speculative.depth)
        self._steps_to_probe -= 1
        if self._steps_to_probe <= 0:
            return self._probe(self._last, requests, context)
        return _step(self._last, requests)

    def _outlook(self, requests: int, context: float) -> Outlook:
        self._steps += 1
        held = self._held.get(requests)
        if held is None or self._steps - held.made >= OUTLOOK_STEPS:
            ahead = outlook(self.times, self.survivals, requests, context, self._depth, self._drafts)
            self._held[requests] = held = _Held(self._steps, ahead)
        return held.outlook

    def least_gain(self, requests: int, depth: int, context: float) -> float:
        """Accepted drafts that a request must bring per round to be worth its share of the draft stage.

        Of a step of as many requests as the last choice was made for.
        """
        held, last = self._held.get(requests), self._last
        if held is None or last is None:
            return 0.0
        if depth not in held.share_ms:
            draft_ms = [
                self.times.one(count, 0, depth, context) - self.times.one(count, 0, 0, context)
                for count in (requests - 1, requests)
            ]
            held.share_ms[depth] = max(0.0, draft_ms[1] - draft_ms[0])
        return held.share_ms[depth] * last.tokens_per_ms

    def _take_side(self, gain: float) -> None:
        """Park, or speculate again, when the other side has been ahead by enough for long enough."""
        if self.survivals.num_observed < FIRST_LOOK_ROUNDS:
            return
        other_side = gain - MIN_GAIN if self.parked else -gain
        self._advantage = max(0.0, self._advantage + other_side)
        if self._advantage >= SWITCH_AT:
            self.parked = not self.parked
            self._advantage = 0.0

    def _probe(self, usual: Candidate, requests: int, context: float) -> Choice:
        """Learn about what is not done: how long it takes, or what it would yield.

        By turns a rival step, because the table may be wrong about it, and one request drafted and verified in full:
        without, a parked server would never notice that the text got easier, and nothing could correct a head that is
        too careful.
        """
        self._probes += 1
        rival = self._rival(usual, requests, context) if self._probes % 2 == 0 else None
        gamma, probed = self.times.table.gamma, (self._probes + 1) // 2 % requests
        if rival is not None:
            choice, ms, committed = _step(rival, requests), rival.ms, rival.committed
        elif self.parked:
            choice = Choice(Rule.TOP, gamma, gamma, forced=probed, drafted=(probed,), weight=PARKED_PROBE_WEIGHT)
            count = requests if self.whole_batches else 1
            draft_ms = self.times.one(count, 0, gamma, context) - self.times.one(count, 0, 0, context)
            ms, committed = self.times.one(requests, gamma, 0, context) + draft_ms, usual.committed
        else:
            choice = _step(usual, requests)
            if choice.budget < requests * gamma:
                choice = Choice(Rule.TOP, gamma, min(choice.budget + gamma, requests * gamma), forced=probed)
            ms, committed = self.times.one(requests, choice.budget, choice.depth, context), usual.committed
        cost = ms / usual.ms - committed / usual.committed  # in usual steps
        self._steps_to_probe = max(PROBE_STEPS, cost / PROBE_SHARE)
        return choice

    def _rival(self, usual: Candidate, requests: int, context: float) -> Candidate | None:
        """The step with the best prospects, if the table may be so wrong about it that it is the fastest."""
        gamma = self.times.table.gamma

        def drafts(step: Candidate) -> int:
            return min(round(step.num_tokens / requests) - 1, gamma)

        hope = np.exp(DOUBT * self.times.doubt(requests, drafts(usual)))
        prospects = {
            rival: rival.tokens_per_ms * hope[drafts(rival)]
            for rival in by_drafts(self.times, self.survivals, requests, context)
            if drafts(rival) != drafts(usual)
        }
        best = max(prospects, key=lambda rival: prospects[rival], default=None)
        return best if best is not None and prospects[best] > usual.tokens_per_ms else None

    def report(self) -> dict[str, Any]:
        expected = None if self._last is None else self._last.tokens_per_ms * 1e3
        return {
            "parked": self.parked,
            "probes": self._probes,
            "expected_tokens_per_s": expected,
            "lagged_survival": self.survivals.mean().tolist(),
            "step_time": self.times.report(),
        }


def _step(candidate: Candidate, requests: int) -> Choice:
    """All requests drafted to the candidate's depth, and as many drafts verified as it has room for."""
    if candidate.depth == 0:
        return PLAIN
    budget = min(candidate.num_tokens - requests, requests * candidate.depth)
    return Choice(Rule.TOP, candidate.depth, budget)


def draft_depths(draft_ms: Array) -> tuple[int, ...]:
    """Block depths worth telling apart, given [requests, drafts, contexts] draft times: all, or only gamma."""
    gamma = draft_ms.shape[1] - 1
    totals = draft_ms.sum((0, 2))  # over the grid: a single cell is cheaper by chance
    shallow_is_cheaper = bool((totals[1:-1] < 0.95 * totals[-1]).any())
    return tuple(range(1, gamma + 1)) if shallow_is_cheaper else (gamma,)
