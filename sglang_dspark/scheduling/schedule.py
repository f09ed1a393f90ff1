"""The schedule of a server: decides each step with its policy, and learns from the outcomes.

The weight of a request's drafts depends on how well the request has kept its SLO so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from sglang_dspark.config import DSparkConfig
from sglang_dspark.errors import ConfigError
from sglang_dspark.scheduling.auto_policy import AutoPolicy, draft_depths
from sglang_dspark.scheduling.forecast import Forecast, LaggedSurvivals, StepFeedback
from sglang_dspark.scheduling.online_calibration import OnlineCalibration
from sglang_dspark.scheduling.policies import EarlyStopPolicy, ExtraRows, FixedPolicy, Policy, ThresholdPolicy
from sglang_dspark.scheduling.sps_table import SpsTable
from sglang_dspark.scheduling.step_times import StepClock, StepKind, StepTimes
from sglang_dspark.step.decision import PLAIN, StepDecision, StepRecord, TimedStep
from sglang_dspark.step.state import RequestLimits


class Schedule:
    """Chooses what a step does, selects the drafts that it verifies, and passes on what came of them.

    Args:
        max_verify: most drafts that a step may verify per request.
        calibration: of the confidence head; None without one.
        device: where confidences live.
        lag: steps that the device may be behind when the next one is chosen: the time between two choices is that of
            the step so many before.

    Attributes:
        options: the server's, with the policy in force.
        policy: the policy in force.
        fixed_draft_shape: whether all requests are drafted to the full depth in any case, as in CUDA graphs.
        uniform: whether whole blocks are computed, whatever a step verifies of them.
        forecast: how likely drafts are to survive.
        times: how long steps take; None without a table.
    """

    def __init__(
        self,
        options: DSparkConfig,
        max_verify: int,
        calibration: OnlineCalibration | None,
        device: torch.device,
        lag: int = 0,
    ) -> None:
        self.options = options
        self.max_verify = max_verify
        self.forecast = Forecast(max_verify, calibration, adapts=options.online_calibration, device=device)
        self.times: StepTimes | None = None
        self._on_cpu = device.type == "cpu"
        self._clock = StepClock(lag, synchronous=self._on_cpu)
        self.fixed_draft_shape = False
        self.uniform = False
        self.policy: Policy = FixedPolicy(0, "off")
        self._auto: AutoPolicy | None = None  # keeps what it decided while another policy is in force

    def start(self, table: SpsTable | None, *, fixed_draft_shape: bool = False, uniform: bool = False) -> None:
        """Begin with the configured policy. Without a drafter, ``auto`` verifies what presets copy.

        Args:
            table: measured step times; None if the policy needs none.
            fixed_draft_shape, uniform: see the attributes.
        """
        self.fixed_draft_shape, self.uniform = fixed_draft_shape, uniform
        if table is not None:
            padded = self._on_cpu and not uniform
            self.times = StepTimes(table, overlapped=self._clock.overlapped, padded=padded)
            depths = (table.gamma,) if self.fixed_draft_shape else draft_depths(table.draft_ms)
            self.forecast.lagged = LaggedSurvivals(self.max_verify, depths)
            self._auto = self._make_auto(self.times, self.forecast.lagged)
        self.policy = self._make_policy(self.options)

    def _make_auto(self, times: StepTimes, lagged: LaggedSurvivals) -> AutoPolicy:
        return AutoPolicy(times, lagged, self.fixed_draft_shape, uniform=self.uniform)

    def forget(self, *, new_drafter: bool = False) -> None:
        """Forget what outcomes have shown, and with it whether the server is parked: other weights are in force.

        How long steps take does not depend on weights.

        Args:
            new_drafter: whether another drafter has taken the place of the one that temperatures were read for.
        """
        lagged = self.forecast.lagged
        if lagged is not None and self.times is not None:
            lagged = LaggedSurvivals(self.max_verify, lagged.depths)
            self._auto = self._make_auto(self.times, lagged)
        self.forecast.forget(lagged, new_drafter=new_drafter)
        self.policy = self._make_policy(self.options)

    def switch(self, fields: dict[str, Any]) -> None:
        """Take another policy from the next step on; fields and errors: see :meth:`DSparkConfig.with_policy`."""
        options = self.options.with_policy(fields)
        self.policy = self._make_policy(options)
        self.options = options
        if self._auto is not None:
            self._auto.forget_evaluations()

    def why_not(self, policy: str) -> str | None:
        """Return why this server cannot switch to a policy; None if it can."""
        fields: dict[str, Any] = {"policy": policy}
        if policy == "threshold":
            fields["confidence_threshold"] = 0.5
        try:
            self._make_policy(self.options.with_policy(fields))
        except ConfigError as error:
            return str(error)
        return None

    def waits_for_device(self, policy: str) -> bool:
        """Return whether the host has to read something of the step itself before it can verify."""
        return policy in ("early-stop", "threshold") or (policy == "auto" and self.options.draft_free)

    def _make_policy(self, options: DSparkConfig) -> Policy:
        if self.max_verify == 0 and options.schedule not in ("static", "off"):
            raise ConfigError(
                f"policy={options.schedule!r} verifies drafts, and this server was started without K/V slots for any; "
                "start it with --speculative-dspark-schedule auto"
            )
        match options.schedule:
            case "static":
                return FixedPolicy(options.max_verify(self.max_verify))
            case "off":
                return FixedPolicy(0, "off")
            case "auto" if options.draft_free:
                # Of a block without a drafter, chains are certain.
                return ThresholdPolicy(self.max_verify, 0.5, "auto", needs_confidence=False)
            case "threshold":
                if self.forecast.calibration is None:
                    raise ConfigError("policy='threshold' needs a drafter with a confidence head; use auto or static")
                assert options.confidence_threshold is not None, "checked with the options"
                return ThresholdPolicy(self.max_verify, options.confidence_threshold)
            case "early-stop" if self.uniform:
                raise ConfigError(
                    "policy='early-stop' gives each request a length of its own, and this server computes whole "
                    "blocks of all; use auto or static"
                )
        if self._auto is None or self.times is None:
            raise ConfigError(
                f"policy={options.schedule!r} needs measured step times, which this server has not taken; start it "
                "with --speculative-dspark-schedule auto"
            )
        return self._auto if options.schedule == "auto" else EarlyStopPolicy(self.max_verify, self.times)

    def choose(
        self,
        requests: Sequence[str],
        context: float,
        limits: RequestLimits | None = None,
        weights: Sequence[float] | None = None,
        extra: ExtraRows | None = None,
        *,
        traced: bool = False,
        awaited: bool = False,
    ) -> StepDecision:
        """Decide the step ahead, and take the time of the one before, which is in ``last_time`` then.

        Args:
            requests: ids of the requests.
            context: mean context tokens per request.
            limits: what the requests ask for themselves; None if no request asks for anything.
            weights: what a draft of each request counts compared with those of others; None if all count alike.
            extra: further rows of the step's verification.
            traced: whether a request wants to be told the confidences.
            awaited: whether the host of a GPU has waited for the step before; see :meth:`StepClock.start_step`.
        """
        self._clock.start_step(self.times, awaited=awaited)
        decision = self.policy.choose(len(requests), context, extra).within(limits).weighted(weights)
        if len(requests) == 1 and not self.policy.can_spend(requests[0], decision, context):
            decision = PLAIN
        self._clock.decided()
        with_confidence = traced or decision.has_threshold or self.policy.needs_confidence
        return replace(decision, context=context, with_confidence=with_confidence)

    @property
    def parked(self) -> bool:
        """Return whether the server drafts nothing because non-speculative steps are faster."""
        return self.policy.parked

    @property
    def last_time(self) -> TimedStep | None:
        """Return the step that was measured last; None if it could not be."""
        return self._clock.last

    def end_step(self, decision: StepDecision, requests: int, num_tokens: int) -> None:
        """End the step: all stages were called. Its time counts unless it drafts or verifies for some requests only.

        Args:
            num_tokens: rows of the verify forward, padding included: the cost of a tier is known from its size.
        """
        # A non-speculative step is identified by its requests, however many rows they are padded to.
        num_tokens = num_tokens if decision.draft_len else requests
        known = has_usable_time(decision, requests)
        self._clock.end_step(StepKind(requests, num_tokens, decision.draft_len, decision.context) if known else None)

    def processed(self, device_ms: float, waited_ms: float) -> None:
        """Take a step's time on a GPU, and how long the host waited for it; both are known when its result is read."""
        self._clock.processed(device_ms, waited_ms)

    def invalidate(self) -> None:
        """Forget earlier steps: something else runs, and the time until the next step is not a step's."""
        self._clock.invalidate()

    def observe(self, record: StepRecord, running: list[int], accept_lens: list[int]) -> None:
        """Learn from a step: the indices of the requests that are still running, and how many drafts each accepted."""
        drafted = [i for i, request in enumerate(running) if record.drafted[request]]
        if not drafted:
            self.forecast.observe_plain()
            return
        if self._auto is not None and len(record.requests) == 1:
            self._auto.budget.earn(record.requests[0], accept_lens[0])
        self.forecast.observe(StepFeedback(record, [running[i] for i in drafted], [accept_lens[i] for i in drafted]))

    def report(self) -> dict[str, Any]:
        """Return JSON for the statistics."""
        self.forecast.update()
        calibration = self.forecast.calibration
        return {
            "policy": self.policy.name,
            "schedule": self.policy.report(),
            "calibration": None if calibration is None else calibration.report(),
        }


def has_usable_time(decision: StepDecision, requests: int) -> bool:
    """Return whether the time of a step says how long others like it take.

    It does not if only some requests are drafted. A parked server's probe of several requests has nearly the rows of a
    non-speculative step, but not its time.
    """
    probe = decision.weight > 1 and requests > 1
    return decision.draft_requests is None and not probe


# Tokens on time that every answer begins with, so that the luck of its first steps does not decide.
SLO_HEAD_TOKENS = 8
# By the time taken over the time that the SLO allows: what a request counts. One that is early lends rows, and one that
# is late, or nearly, gets them. Simulated, drafts move from the others to users with an SLO for the least tokens if all
# of these count 2 to 3: weights from 0.25 to 4 met fewer SLOs, because rows moved among these users, too. One that is
# too late is given up, because rows bring least on hard text; where that was at 1.1, luck decided. With the budget of
# the most weighted tokens, in place of that of the most tokens, nothing differed.
SLO_URGENCY = ((0.8, 0.7), (0.95, 3.0), (1.5, 3.0), (1.8, 1.0))


@dataclass
class SloState:
    """The answer of one request against its SLO. Times are milliseconds of any monotonic clock.

    Attributes:
        tpot_ms: time per token after the first that the SLO allows; None for no SLO.
        base_weight: what a draft of the request counts apart from that.
        began_ms: when its first tokens were known; None before.
        first_tokens: how many these were.
    """

    tpot_ms: float | None = None
    base_weight: float = 1.0
    began_ms: float | None = None
    first_tokens: int = 0

    @property
    def asks(self) -> bool:
        """Return whether the request asks for anything."""
        return self.tpot_ms is not None or self.base_weight != 1

    def begin(self, now_ms: float, tokens: int) -> None:
        """Begin the answer with its first tokens, if so many are known and it has not begun."""
        if self.began_ms is None and tokens:
            self.began_ms, self.first_tokens = now_ms, tokens

    def weight(self, now_ms: float, tokens: int) -> float:
        """Return what a draft of the request counts now, with so many tokens known."""
        self.begin(now_ms, tokens)
        if self.tpot_ms is None or self.began_ms is None:
            return self.base_weight
        head_ms = SLO_HEAD_TOKENS * self.tpot_ms
        allowed_ms = (tokens - self.first_tokens) * self.tpot_ms
        return self.base_weight * _urgency((now_ms - self.began_ms + head_ms) / (allowed_ms + head_ms))

    def late_ms(self, now_ms: float, tokens: int) -> float:
        """Return by how much so many tokens are later than the SLO allows; negative if early, 0 without an SLO."""
        if self.tpot_ms is None or self.began_ms is None:
            return 0.0
        return now_ms - self.began_ms - (tokens - self.first_tokens) * self.tpot_ms


def _urgency(taken: float) -> float:
    if taken <= SLO_URGENCY[0][0]:
        return SLO_URGENCY[0][1]
    for (left, before), (right, after) in pairwise(SLO_URGENCY):
        if taken < right:
            return before + (after - before) * (taken - left) / (right - left)
    return SLO_URGENCY[-1][1]
