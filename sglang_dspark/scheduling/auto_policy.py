"""The policy ``auto``: the step that promises the most tokens per millisecond, by what earlier steps have shown."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_dspark.scheduling.lagged_survival import LaggedSurvivals
from sglang_dspark.scheduling.planner import Candidate, Evaluation, by_drafts, evaluate_steps
from sglang_dspark.scheduling.policies import Policy
from sglang_dspark.scheduling.step_times import UNKNOWN_STDDEV, StepTimes
from sglang_dspark.step.decision import PLAIN, StepDecision
from sglang_dspark.step.selection import TopK

# A step that differs from the last one has to promise this much more throughput, and so has speculation over none:
# noise in the estimates must not move a server away from a choice that is as good.
MIN_GAIN = 0.01
# A server changes sides (parks, or speculates again) when the other side's advantage, summed over the steps it lasts,
# reaches this: at once when it is large, after a while when it is small.
SWITCH_AT = 0.08
# But not before it has seen this many rounds: what is known of a drafter before that is a guess.
MIN_ROUNDS = 64
# Steps that an evaluation holds for: what it is made of changes slowly, survivals once in so many steps, and making it
# is most of the work of a choice.
EVALUATION_STEPS = 8
# Now and then a step serves to learn something (a trial), not before all that the last one cost is at most this share
# of the throughput since. One drafts and verifies a request in full (a probe), after so many steps; on a cold start
# later, because it is the table that may cost much there.
PROBE_SHARE = 0.01
PROBE_STEPS, FIRST_PROBE_STEPS = 32, 128
# The other times a step that is not the usual one (a look), if it may be the fastest within so many standard deviations
# of its time. So many steps after the last one while nothing is known of such steps but what the table says, because a
# wrong one has to be found out soon; and later the more is known of them.
OPTIMISM = 1.5
EXPLORE_STEPS = 4
# A parked server sees little, so what it sees counts for more: rounds that a probe stands for.
PARKED_PROBE_WEIGHT = 4


@dataclass
class _Held:
    """What is known of steps with a number of requests, for the next few of them.

    Attributes:
        made: step at which it was found out.
        share_ms: milliseconds of the draft stage that the last request adds, by depth.
    """

    made: int
    evaluate_steps: Evaluation
    share_ms: dict[int, float] = field(default_factory=dict)


@dataclass
class AutoPolicy(Policy):
    """``auto``: the fastest step by measured times and earlier survivals; a plain step where that is the fastest.

    Attributes:
        times, survivals: what it knows; both are fed from outside.
        fixed_draft_shape: whether a step that drafts for one request drafts for all, as CUDA graphs do.
    """

    times: StepTimes
    survivals: LaggedSurvivals
    fixed_draft_shape: bool = False
    name: str = "auto"
    needs_confidence: bool = True
    parked: bool = False
    probing: bool = False
    _held: dict[int, _Held] = field(default_factory=dict, init=False)
    _steps: int = field(default=0, init=False)
    _advantage: float = field(default=0.0, init=False)
    _steps_to_explore: float = field(default=EXPLORE_STEPS, init=False)
    _steps_to_probe: int = field(default=FIRST_PROBE_STEPS, init=False)
    _steps_since_trial: int = field(default=0, init=False)
    _trial_cost: float = field(default=0.0, init=False)  # of the last one, in usual steps
    _explored: tuple[int, Candidate] | None = field(default=None, init=False)  # by the last trial, with its requests
    _probes: int = field(default=0, init=False)
    _trials: int = field(default=0, init=False)  # looks and probes
    _depth: int = field(init=False)
    _drafts: float = field(init=False)
    _last: Candidate | None = field(default=None, init=False)
    _speculative: Candidate | None = field(default=None, init=False)  # the last one, or what it would have been

    def __post_init__(self) -> None:
        # The current of the first step is the whole block: trimming, too, has to earn its place.
        self._depth = self.times.table.gamma
        self._drafts = float(self._depth)

    def choose(self, requests: int, context: float) -> StepDecision:
        ahead = self._evaluate(requests, context)
        better = ahead.best.tokens_per_ms > (1 + MIN_GAIN) * ahead.current.tokens_per_ms
        speculative = ahead.best if better else ahead.current
        gain = math.log(speculative.tokens_per_ms / ahead.plain.tokens_per_ms)
        self._take_side(gain)
        self._speculative = speculative
        self._last = ahead.plain if self.parked else speculative
        if not self.parked:
            self._depth, self._drafts = speculative.depth, min(speculative.num_tokens / requests - 1, speculative.depth)
        usual = _step(self._last, requests)
        decision = self._trial(self._last, requests, context) or usual
        self.probing = decision != usual
        return decision

    def resumed(self, requests: int) -> StepDecision:
        assert self._speculative is not None, "a step has been chosen"
        return _step(self._speculative, requests)

    def forget_evaluations(self) -> None:
        """Forget what was worked out from what was known some time ago."""
        self._held.clear()

    def _evaluate(self, requests: int, context: float) -> Evaluation:
        self._steps += 1
        held = self._held.get(requests)
        if held is None or self._steps - held.made >= EVALUATION_STEPS:
            ahead = evaluate_steps(self.times, self.survivals, requests, context, self._depth, self._drafts)
            self._held[requests] = held = _Held(self._steps, ahead)
        return held.evaluate_steps

    def min_acceptance(self, requests: int, depth: int, context: float) -> float:
        """Accepted drafts that a request must bring per round: what is committed in the time that drafting it takes.

        One of several leaves its part of the verification to the others, so that its share of the draft stage is what
        it takes. A lone one takes all that a speculative step needs beyond the plain one. Of a step of as many requests
        as the last decision was made for.
        """
        held, last, alone = self._held.get(requests), self._last, self._speculative
        if held is None or last is None or alone is None:
            return 0.0
        if requests == 1:
            plain = held.evaluate_steps.plain
            return (alone.ms - plain.ms) * plain.tokens_per_ms
        if depth not in held.share_ms:
            draft_ms = [
                self.times.one(count, 0, depth, context) - self.times.one(count, 0, 0, context)
                for count in (requests - 1, requests)
            ]
            held.share_ms[depth] = max(0.0, draft_ms[1] - draft_ms[0])
        return held.share_ms[depth] * last.tokens_per_ms

    def _take_side(self, gain: float) -> None:
        """Park, or speculate again, when the other side has been ahead by enough for long enough."""
        if self.survivals.num_observed < MIN_ROUNDS:
            return
        other_side = gain - MIN_GAIN if self.parked else -gain
        self._advantage = max(0.0, self._advantage + other_side)
        if self._advantage >= SWITCH_AT:
            self.parked = not self.parked
            self._advantage = 0.0

    def _trial(self, usual: Candidate, requests: int, context: float) -> StepDecision | None:
        """A step to learn about what is not done, where one is due.

        A look at a rival step, because the table may be wrong about it; or a probe, one request drafted and verified in
        full: without, a parked server would never notice that the text got easier, and nothing could correct a head
        that is too careful.
        """
        self._steps_to_explore -= 1
        self._steps_to_probe -= 1
        self._steps_since_trial += 1
        if self._steps_to_explore <= 0 and self._explored is not None:
            # The look may have shown that it cost less than it seemed to.
            if self._explored[0] == requests:
                self._trial_cost = self._loss(self._explored[1], usual, requests, context)
            self._explored = None
        if self._steps_since_trial < self._trial_cost / PROBE_SHARE:
            return None
        if self._steps_to_probe <= 0:
            self._steps_to_probe = PROBE_STEPS
            return self._probe(usual, requests, context)
        if self._steps_to_explore <= 0:
            rival, doubt = self._alternative(usual, requests, context)
            if rival is not None:
                self._explored = requests, rival
                self._steps_to_explore = EXPLORE_STEPS * UNKNOWN_STDDEV / doubt
                self._spend(self._loss(rival, usual, requests, context))
                return _step(rival, requests)
            self._steps_to_explore = PROBE_STEPS
        return None

    def _spend(self, cost: float) -> None:
        """A trial that costs so many usual steps."""
        self._trials += 1
        self._steps_since_trial, self._trial_cost = 0, cost

    def _loss(self, step: Candidate, usual: Candidate, requests: int, context: float) -> float:
        """Return what ``step`` loses against the usual one by what is known of its time now, in usual steps."""
        decision = _step(step, requests)
        ms = self.times.one(requests, _drafts(decision, requests), decision.draft_len, context)
        return ms / usual.ms - step.committed / usual.committed

    def _probe(self, usual: Candidate, requests: int, context: float) -> StepDecision:
        """One request drafted and verified in full, each in its turn."""
        self._probes += 1
        gamma, probed = self.times.table.gamma, self._probes % requests
        if self.parked:
            # A lone request is the whole batch, whose step has a time that teaches. Where all are drafted in any case,
            # the survivals of all are known.
            drafted = (probed,) if requests > 1 and not self.fixed_draft_shape else None
            decision = StepDecision(
                gamma, TopK(gamma, probe_request=probed), draft_requests=drafted, weight=PARKED_PROBE_WEIGHT
            )
            count = requests if self.fixed_draft_shape else 1
            draft_ms = self.times.one(count, 0, gamma, context) - self.times.one(count, 0, 0, context)
            ms = self.times.one(requests, gamma, 0, context) + draft_ms
        else:
            decision = _step(usual, requests)
            if _drafts(decision, requests) < requests * gamma:
                budget = min(_drafts(decision, requests) + gamma, requests * gamma)
                decision = StepDecision(gamma, TopK(budget, probe_request=probed))
            ms = self.times.one(requests, _drafts(decision, requests), decision.draft_len, context)
        self._spend(ms / usual.ms - 1)
        return decision

    def _alternative(self, usual: Candidate, requests: int, context: float) -> tuple[Candidate | None, float]:
        """The step with the best prospects, and the doubt about its time.

        None unless the table may be so wrong about it that it is the fastest.
        """
        gamma = self.times.table.gamma

        def drafts(step: Candidate) -> int:
            return min(round(step.num_tokens / requests) - 1, gamma)

        doubt = self.times.stddev(requests, drafts(usual))
        hope = np.exp(OPTIMISM * doubt)
        prospects = {
            rival: rival.tokens_per_ms * hope[drafts(rival)]
            for rival in by_drafts(self.times, self.survivals, requests, context)
            if drafts(rival) != drafts(usual)
        }
        best = max(prospects, key=lambda rival: prospects[rival], default=None)
        if best is None or prospects[best] <= usual.tokens_per_ms:
            return None, 0.0
        return best, float(doubt[drafts(best)])

    def report(self) -> dict[str, Any]:
        expected = None if self._last is None else self._last.tokens_per_ms * 1e3
        return {
            "parked": self.parked,
            "probes": self._trials,
            "expected_tokens_per_s": expected,
            "lagged_survival": self.survivals.mean().tolist(),
            "step_time": self.times.report(),
        }


def _step(candidate: Candidate, requests: int) -> StepDecision:
    """All requests drafted to the candidate's depth, and as many drafts verified as it has room for."""
    if candidate.depth == 0:
        return PLAIN
    budget = min(candidate.num_tokens - requests, requests * candidate.depth)
    return StepDecision(candidate.depth, TopK(budget))


def _drafts(decision: StepDecision, requests: int) -> int:
    """Return the drafts that a step verifies, which this policy always knows."""
    return decision.max_drafts(requests) or 0


def draft_depths(draft_ms: NDArray[np.float64]) -> tuple[int, ...]:
    """Block depths worth telling apart, given [requests, drafts, contexts] draft times: all, or only gamma."""
    gamma = draft_ms.shape[1] - 1
    totals = draft_ms.sum((0, 2))  # over the grid: a single cell is cheaper by chance
    shallow_is_cheaper = bool((totals[1:-1] < 0.95 * totals[-1]).any())
    return tuple(range(1, gamma + 1)) if shallow_is_cheaper else (gamma,)
