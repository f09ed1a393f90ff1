"""The policy ``auto``: the step that promises the most tokens per millisecond; how deep to draft, how much to verify.

All inputs were known before the step's noise is drawn: measured times and the survivals of earlier steps. That keeps
the output exact, see docs/scheduling.md. What speculation may lose on a request that runs alone is bounded, whatever
the drafter is worth.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_dspark.scheduling.forecast import UPDATE_STEPS, LaggedSurvivals
from sglang_dspark.scheduling.policies import ExtraRows, Policy
from sglang_dspark.scheduling.step_times import StepTimes
from sglang_dspark.step.decision import PLAIN, StepDecision
from sglang_dspark.step.selection import TopK


@dataclass(frozen=True)
class Candidate:
    """A step that could be taken.

    Attributes:
        depth: drafts proposed per request; 0 for the non-speculative step.
        num_tokens: tokens in the verify forward, anchors included.
        ms: its time.
        committed: tokens that it is expected to commit.
    """

    depth: int
    num_tokens: int
    ms: float
    committed: float

    @property
    def tokens_per_ms(self) -> float:
        """Return the expected throughput, which the policy maximises."""
        return self.committed / self.ms


@dataclass(frozen=True)
class Evaluation:
    """The candidates for a number of requests.

    Attributes:
        plain: the step that drafts nothing and commits one token per request.
        by_drafts: the fastest step for each number of drafts per request that can be verified, from 0, the
            non-speculative step, to gamma.
        best: the fastest speculative step.
    """

    plain: Candidate
    by_drafts: list[Candidate]
    best: Candidate


def evaluate_steps(
    times: StepTimes, survivals: LaggedSurvivals, requests: int, context: float, *, uniform: bool = False
) -> Evaluation:
    """Evaluate every step that ``requests`` requests can take: (R + gain) / T over all depths and token counts.

    Args:
        context: mean context tokens per request.
        uniform: whether all requests verify as many drafts, each of them its whole block.
    """
    load = times.table.times(requests)
    all_ms = times.step_ms(requests, context)
    plain = Candidate(0, int(load.num_tokens[0]), float(all_ms[0, 0]), requests)
    ms = all_ms.take(survivals.depths, axis=0)  # [depths, n], as the next two
    budgets = np.minimum(load.num_tokens - requests, requests * times.table.gamma)
    committed = requests + survivals.gains(requests)[:, budgets]
    # A step that verifies none of its drafts has nothing over the plain one.
    rates: NDArray[np.float64] = np.where(load.num_tokens > requests, committed / ms, 0.0)
    depths: Sequence[int] = range(1, times.table.gamma + 1)
    if uniform:
        depths = survivals.depths
        whole = requests * (1 + np.array(depths))[:, None]
        rates = np.where(load.num_tokens == whole, rates, 0.0)

    def candidate(row: int, column: int) -> Candidate:
        return Candidate(
            survivals.depths[row], int(load.num_tokens[column]), float(ms[row, column]), float(committed[row, column])
        )

    columns = [load.column(drafts) for drafts in depths]
    return Evaluation(
        plain=plain,
        by_drafts=[plain, *(candidate(int(rates[:, column].argmax()), column) for column in columns)],
        best=candidate(*divmod(int(rates.argmax()), rates.shape[1])),
    )


def worth_most_with(
    times: StepTimes, survivals: LaggedSurvivals, requests: int, context: float, extra: ExtraRows, worth: float
) -> Candidate:
    """Return the step that commits the most tokens beyond what its time is worth, when other rows take some of it.

    A ratio of tokens to time would charge the drafts for those rows, and buy too many. Where no step keeps the bound,
    the shortest one is taken.

    Args:
        extra: rows of its verification that are none of the requests'.
        worth: tokens per millisecond of the best step without such rows.
    """
    joined = times.table.times(requests + extra.requests)
    first = int(joined.room_for(requests + extra.rows))
    joined_context = extra.joined_context(requests, context)
    verify_ms = times.step_ms(requests + extra.requests, joined_context)[0, first:]
    alone_ms = times.step_ms(requests, context)[:, 0]
    drafts = np.minimum(joined.num_tokens[first:] - extra.rows - requests, requests * times.table.gamma)
    # [1 + depths, n], the non-speculative step first.
    ms = verify_ms + np.append(0.0, alone_ms[list(survivals.depths)] - alone_ms[0])[:, None]
    gains = survivals.gains(requests)[:, drafts]
    committed = requests + np.concatenate([np.zeros((1, len(drafts))), gains])
    value = committed - worth * ms
    late_ms = np.maximum(ms * times.common_factor, extra.bound_ms)
    row, column = divmod(int(np.where(late_ms == late_ms.min(), value, -np.inf).argmax()), len(drafts))
    depth = 0 if row == 0 else survivals.depths[row - 1]
    return Candidate(depth, requests + int(drafts[column]), float(ms[row, column]), float(committed[row, column]))


# In non-speculative steps: what a request may lose at once, and what every step adds. Of 200 tokens it is 3 %. With a
# stake of 3, a text that changes loses up to 4 % more in the ablation; with half the rate, drafts that pay by a fifth
# on a costly target lose some 4 % more of their first 200 tokens, because more non-speculative steps follow bad luck.
BUDGET_START, BUDGET_PER_STEP = 2.0, 0.02
# What was gained is kept up to this: with no more than the stake, drafts that pay by a little are given up too often.
BUDGET_MOST = 6.0


class SingleRequestBudget:
    """The non-speculative steps that drafting for a request that runs alone may still lose.

    A step with drafts takes what it costs beyond a non-speculative step before it runs, and each draft that is accepted
    gives one back when the outcome is known. Only if the budget is enough for the whole cost are drafts made.
    """

    def __init__(self) -> None:
        self._request: Hashable = None
        self._left = BUDGET_START

    def can_spend(self, request: Hashable, cost: float, *, pays: bool) -> bool:
        """Return whether the budget is enough for the next step of ``request``, and take its cost if it is.

        Args:
            cost: time of the step beyond a plain one, in non-speculative steps.
            pays: whether drafts are expected to pay: a new request gets a new stake then, and otherwise what the one
                before it has left of its own.
        """
        if request != self._request:
            self._request, self._left = request, BUDGET_START if pays else min(BUDGET_START, self._left)
        cost = min(cost, BUDGET_START)
        can_spend = cost <= self._left
        self._add(BUDGET_PER_STEP - cost if can_spend else BUDGET_PER_STEP)
        return can_spend

    def earn(self, request: Hashable, accepted: int) -> None:
        """Add the accepted drafts of a step."""
        if request == self._request:
            self._add(accepted)

    def _add(self, steps: float) -> None:
        self._left = min(BUDGET_MOST, self._left + steps)


# One percent of the throughput: what speculation has to promise over non-speculative steps before a parked server
# speculates again, and the most that trials cost. Less is lost in the noise of the estimates.
MARGIN = 0.01
# A server does not park before it has seen this many rounds: the mean of fewer is off by 8 % of the accepted drafts.
MIN_ROUNDS = 64
# A probe drafts and verifies one request in full, after so many steps. Four of them are 128 steps, in which a parked
# server notices that its text got easier, about as long as a short answer takes.
PROBE_STEPS = 32
# A parked server sees little, so what it sees counts for more: rounds that a probe stands for. With 2 instead of 4 the
# ablation loses up to 10 % when a text gets easier.
PARKED_PROBE_WEIGHT = 4
# An exploration takes another step than the best one, after so many steps: a wrong table has to be found out soon. With
# 8 or 16 a costly target with a wrong table loses 2 % in the ablation.
EXPLORE_STEPS = 4
# It is a step that would be the fastest if its time were so many standard deviations shorter. With 1.0 a server whose
# table is wrong by a quarter stays parked; with 2.0 right tables cost 0.3 %.
OPTIMISM = 1.5


@dataclass
class AutoPolicy(Policy):
    """``auto``: the fastest step according to measured times and earlier survivals, non-speculative ones included.

    Attributes:
        times, survivals: what it knows; both are fed from outside.
        budget: of the request that runs alone; its gains come from outside.
        fixed_draft_shape: whether a step that drafts for one request drafts for all, as CUDA graphs do.
        uniform: whether all requests verify as many drafts.
        probing: whether the last decision is a trial, taken to learn something.
    """

    times: StepTimes
    survivals: LaggedSurvivals
    fixed_draft_shape: bool = False
    uniform: bool = False
    name: str = "auto"
    needs_confidence: bool = True
    parked: bool = False
    probing: bool = False
    budget: SingleRequestBudget = field(default_factory=SingleRequestBudget, init=False)
    # By requests: the step at which they were made, and evaluations, which hold for as many steps as survivals do.
    _evaluations: dict[int, tuple[int, Evaluation]] = field(default_factory=dict, init=False)
    _steps: int = field(default=0, init=False)
    _steps_to_explore: int = field(default=EXPLORE_STEPS, init=False)
    _steps_to_probe: int = field(default=4 * PROBE_STEPS, init=False)  # the table first: it may cost more at a start
    _steps_since_trial: int = field(default=0, init=False)
    _trial_cost: float = field(default=0.0, init=False)  # of the last one, in best steps
    _probes: int = field(default=0, init=False)
    _trials: int = field(default=0, init=False)  # explorations and probes
    _last: Candidate | None = field(default=None, init=False)

    def choose(self, requests: int, context: float, extra: ExtraRows | None = None) -> StepDecision:
        steps = self._evaluate(requests, context)
        if self.survivals.num_observed >= MIN_ROUNDS:
            lead = steps.best.tokens_per_ms / steps.plain.tokens_per_ms - 1
            self.parked = lead < (MARGIN if self.parked else 0.0)
        best = self._last = steps.plain if self.parked else steps.best
        decision = _decision(best, requests)
        if extra is not None:  # such a step's time says nothing about others
            self.probing = False
            if self.parked:
                return decision
            worth = steps.best.tokens_per_ms
            return _decision(worth_most_with(self.times, self.survivals, requests, context, extra, worth), requests)
        trial = self._trial(best, requests, context) or decision
        self.probing = trial != decision
        return trial

    def forget_evaluations(self) -> None:
        """Forget what was worked out from what was known some time ago."""
        self._evaluations.clear()

    def _evaluate(self, requests: int, context: float) -> Evaluation:
        self._steps += 1
        made, steps = self._evaluations.get(requests, (0, None))
        if steps is None or self._steps - made >= UPDATE_STEPS:
            steps = self._evaluated(requests, context)
            self._evaluations[requests] = self._steps, steps
        return steps

    def _evaluated(self, requests: int, context: float) -> Evaluation:
        return evaluate_steps(self.times, self.survivals, requests, context, uniform=self.uniform)

    def can_spend(self, request: str, decision: StepDecision, context: float) -> bool:
        steps, cost = self._evaluations[1][1], 0.0
        if decision.draft_len:
            is_best, drafts = decision.limits is None and not self.probing, _num_drafts(decision, 1)
            ms = steps.best.ms if is_best else self.times.single_ms(1, drafts, decision.draft_len, context)
            cost = ms / steps.plain.ms - 1
        pays = steps.best.tokens_per_ms > steps.plain.tokens_per_ms
        return self.budget.can_spend(request, cost, pays=pays)

    def _trial(self, best: Candidate, requests: int, context: float) -> StepDecision | None:
        """Return a step to learn about what is not done; None if none is due, or if the last one is not paid for yet.

        It is a probe: without, a parked server would never notice that the text got easier, and nothing could correct a
        head that is too careful. Or it is an exploration, because the table may be wrong about a step.
        """
        self._steps_to_explore -= 1
        self._steps_to_probe -= 1
        self._steps_since_trial += 1
        if self._steps_since_trial < self._trial_cost / MARGIN:
            return None
        if min(self._steps_to_probe, self._steps_to_explore) > 0:
            return None
        # The one that is longer overdue: if a probe costs much, explorations would never have their turn otherwise.
        if self._steps_to_probe <= self._steps_to_explore:
            self._steps_to_probe = PROBE_STEPS
            return self._probe(best, requests, context)
        return self._explore(best, requests, context)

    def _probe(self, best: Candidate, requests: int, context: float) -> StepDecision:
        """Draft and verify one request in full, each in its turn; all of them if all verify as many drafts."""
        self._probes += 1
        gamma, probed = self.times.table.gamma, self._probes % requests
        if self.uniform:
            weight = PARKED_PROBE_WEIGHT if self.parked else 1
            decision = StepDecision(gamma, TopK(requests * gamma), weight=weight)
            ms = self.times.single_ms(requests, requests * gamma, gamma, context)
        elif self.parked:
            # A lone request is the whole batch, whose step time can be used. If all are drafted in any case, the
            # survivals of all are known.
            drafted = (probed,) if requests > 1 and not self.fixed_draft_shape else None
            decision = StepDecision(
                gamma, TopK(gamma, probe_request=probed), draft_requests=drafted, weight=PARKED_PROBE_WEIGHT
            )
            drafts_for = requests if self.fixed_draft_shape else 1
            draft_ms = [self.times.single_ms(drafts_for, 0, depth, context) for depth in (0, gamma)]
            ms = self.times.single_ms(requests, gamma, 0, context) + (draft_ms[1] - draft_ms[0])
        else:
            decision = _decision(best, requests)
            if _num_drafts(decision, requests) < requests * gamma:
                budget = min(_num_drafts(decision, requests) + gamma, requests * gamma)
                decision = StepDecision(gamma, TopK(budget, probe_request=probed))
            ms = self.times.single_ms(requests, _num_drafts(decision, requests), decision.draft_len, context)
        self._spend(ms / best.ms - 1)
        return decision

    def _explore(self, best: Candidate, requests: int, context: float) -> StepDecision | None:
        """Take the alternative to the best step; without one, look for it again after as long as between probes."""
        alternative = self._alternative(best, requests, context)
        if alternative is None:
            self._steps_to_explore = PROBE_STEPS
            return None
        self._steps_to_explore = EXPLORE_STEPS
        self._spend(alternative.ms / best.ms - alternative.committed / best.committed)
        # The next choice knows the time of this step.
        self._evaluations[requests] = -UPDATE_STEPS, self._evaluations[requests][1]
        return _decision(alternative, requests)

    def _spend(self, cost: float) -> None:
        """Account for a trial that costs so many best steps."""
        self._trials += 1
        self._steps_since_trial, self._trial_cost = 0, cost

    def _alternative(self, best: Candidate, requests: int, context: float) -> Candidate | None:
        """Return the fastest step according to optimistic times; None if that is the best one."""
        gamma = self.times.table.gamma

        def drafts(step: Candidate) -> int:
            return min(round(step.num_tokens / requests) - 1, gamma)

        optimistic = np.exp(OPTIMISM * self.times.stddev(requests, drafts(best)))
        rates = {
            step: step.tokens_per_ms * optimistic[drafts(step)]
            for step in self._evaluated(requests, context).by_drafts
            if drafts(step) != drafts(best)
        }
        alternative = max(rates, key=lambda step: rates[step], default=None)
        return None if alternative is None or rates[alternative] <= best.tokens_per_ms else alternative

    def report(self) -> dict[str, Any]:
        expected = None if self._last is None else self._last.tokens_per_ms * 1e3
        return {
            "parked": self.parked,
            "probes": self._trials,
            "expected_tokens_per_s": expected,
            "lagged_survival": self.survivals.mean().tolist(),
            "step_time": self.times.report(),
        }


def _decision(candidate: Candidate, requests: int) -> StepDecision:
    """Draft all requests to the candidate's depth, and verify as many drafts as it has room for."""
    if candidate.depth == 0:
        return PLAIN
    budget = min(candidate.num_tokens - requests, requests * candidate.depth)
    return StepDecision(candidate.depth, TopK(budget))


def _num_drafts(decision: StepDecision, requests: int) -> int:
    """Return the drafts that a step verifies, which this policy always knows."""
    return decision.max_drafts(requests) or 0


def draft_depths(draft_ms: NDArray[np.float64]) -> tuple[int, ...]:
    """Return the block depths worth telling apart, all or only gamma, from [requests, drafts, contexts] draft times."""
    gamma = draft_ms.shape[1] - 1
    totals = draft_ms.sum((0, 2))  # over the grid: a single cell is cheaper by chance
    shallow_is_cheaper = bool((totals[1:-1] < 0.95 * totals[-1]).any())
    return tuple(range(1, gamma + 1)) if shallow_is_cheaper else (gamma,)
