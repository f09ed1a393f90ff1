"""The schedule of a server: its policy, what the policy knows, and what it learns from every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sglang_dspark.calibration.online import OnlineCalibration
from sglang_dspark.calibration.survival import prefix_survival, sigmoid
from sglang_dspark.config import DSparkConfig
from sglang_dspark.errors import ConfigError
from sglang_dspark.prefix_scheduler.lagged_survival import WINDOW_ROUNDS, LaggedSurvivals
from sglang_dspark.prefix_scheduler.limits import Limits
from sglang_dspark.prefix_scheduler.policies import (
    AdaptiveBlockPolicy,
    AutoPolicy,
    Choice,
    FixedPolicy,
    LivePolicy,
    Policy,
    Rule,
    draft_depths,
)
from sglang_dspark.prefix_scheduler.position_acceptance import PositionAcceptance
from sglang_dspark.prefix_scheduler.request_gains import RequestGains
from sglang_dspark.prefix_scheduler.selection import above_threshold, early_stop, random_lens, top_prefixes
from sglang_dspark.prefix_scheduler.sps_table import Array, SpsTable
from sglang_dspark.prefix_scheduler.step_times import StepKind, StepTimes
from sglang_dspark.stats.predicted import PredictedSurvival
from sglang_dspark.worker.host_index import host_floats, host_index
from sglang_dspark.worker.outcomes import Note, outcomes_of, weighted
from sglang_dspark.worker.state import Drafted, Rounds
from sglang_dspark.worker.step_clock import StepClock

# Learning from a step costs 0.1 ms however few requests it had: so many steps are taken together.
LEARN_STEPS = 8
# Survival of a draft that is verified whatever its confidence, and of one that must not be: outside of [0, 1].
_FORCED, _EXCLUDED = 2.0, -1.0


class Schedule:
    """Chooses, selects, observes, and reports.

    Args:
        options: the server's options; a policy may be switched later.
        max_verify: most drafts that a step may verify per request.
        calibration: of the confidence head; None without one: survivals are the running acceptance by position then.
        device: where confidences live.
        lag: steps that the device may be behind when the next one is chosen: the time between two choices is that of
            the step so many before.

    Attributes:
        whole_batches: whether all requests are drafted to the full depth in any case, as in CUDA graphs: then there is
            nothing to gain from shallow blocks, or from leaving requests out. Set before :meth:`start`.
        coefficients: [2, max_verify] float32, scale and shift of the calibration; without a confidence head, acceptance
            by position in row 0.
        predicted: survivals as they were predicted, against what came of them.
        clock: takes the time of steps.
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
        self.device = device
        self.positions = PositionAcceptance(max_verify)
        self.calibration = calibration
        self.times: StepTimes | None = None
        self.survivals: LaggedSurvivals | None = None
        self.gains = RequestGains()
        self.predicted = PredictedSurvival(max_verify)
        self.clock = StepClock(lag, synchronous=device.type == "cpu")
        self.whole_batches = False
        self._notes: list[Note] = []
        self._context = 0.0
        self._predictions = np.empty((2, 0, max_verify))  # the last rounds: logits, and survivals as predicted
        self.coefficients = self._last_coefficients = self._copy_coefficients()
        self._num_refits = 0
        self.policy: Policy = FixedPolicy(0, "off")
        self._auto: AutoPolicy | None = None  # keeps what it decided while another policy is in force

    def start(self, table: SpsTable | None) -> None:
        """Begin with the configured policy. Without a drafter, ``auto`` drafts nothing: there are presets alone.

        Args:
            table: measured step times; None where the policy needs none.
        """
        if table is not None:
            self.times = StepTimes(table)
            depths = (table.gamma,) if self.whole_batches else draft_depths(table.draft_ms)
            self.survivals = LaggedSurvivals(self.max_verify, depths)
            self._auto = AutoPolicy(self.times, self.survivals, self.whole_batches)
        self.policy = self._make_policy(self.options)

    @property
    def speculates(self) -> bool:
        """Whether drafts are verified at all, whoever proposes them."""
        return self.options.schedule != "off"

    def switch(self, fields: dict[str, Any]) -> None:
        """Take another policy from the next step on.

        Args:
            fields: ``policy``, and ``verify_len`` or ``confidence_threshold`` where it takes one.

        Raises:
            ConfigError: names the field, its value and the remedy.
        """
        options = self.options.with_policy(fields)
        self.policy = self._make_policy(options)
        self.options = options

    def why_not(self, policy: str) -> str | None:
        """Why this server cannot switch to a policy; None where it can."""
        fields: dict[str, Any] = {"policy": policy}
        if policy == "threshold":
            fields["confidence_threshold"] = 0.5
        try:
            self._make_policy(self.options.with_policy(fields))
        except ConfigError as error:
            return str(error)
        return None

    @staticmethod
    def reads_live_values(policy: str) -> bool:
        """Whether a policy needs the confidences of the step itself on the host."""
        return policy in (Rule.EARLY_STOP.value, Rule.THRESHOLD.value)

    def _make_policy(self, options: DSparkConfig) -> Policy:
        if self.max_verify == 0 and options.schedule not in ("static", "off"):
            raise ConfigError(
                f"policy={options.schedule!r} verifies drafts, and this server was started without K/V slots for any; "
                "start it with --speculative-dspark-schedule auto"
            )
        match options.schedule:
            case "static":
                return FixedPolicy(options.static_verify_len(self.max_verify))
            case "off":
                return FixedPolicy(0, "off")
            case "auto" if options.draft_free:
                return FixedPolicy(0, "auto")
            case "threshold":
                if self.calibration is None:
                    raise ConfigError("policy='threshold' needs a drafter with a confidence head; use auto or static")
                return LivePolicy(Rule.THRESHOLD, self.max_verify, options.confidence_threshold)
            case "adaptive-block":
                return AdaptiveBlockPolicy(self.max_verify)
            case "random":
                return LivePolicy(Rule.RANDOM, self.max_verify, needs_confidence=False)
        if self._auto is None:
            raise ConfigError(
                f"policy={options.schedule!r} needs measured step times, which this server has not taken; start it "
                "with --speculative-dspark-schedule auto"
            )
        return self._auto if options.schedule == "auto" else LivePolicy(Rule.EARLY_STOP, self.max_verify)

    def choose(self, requests: Sequence[str], context: float, limits: Limits | None = None) -> Choice:
        """Decide the step ahead, and take the time of the one behind.

        Args:
            requests: ids of the requests.
            context: mean context tokens per request.
            limits: what the requests ask for themselves; None when nobody asks for anything.
        """
        self.clock.enter(self.times)
        self._context = context
        choice = self._choose(requests, context)
        self.clock.begin_stages()
        return choice if limits is None else choice.within(limits)

    def _choose(self, requests: Sequence[str], context: float) -> Choice:
        choice = self.policy.choose(len(requests), context)
        leaves_out = choice.depth > 0 and choice.forced is None and len(requests) > 1 and not self.whole_batches
        if leaves_out and isinstance(self.policy, AutoPolicy):
            least = self.policy.least_gain(len(requests), choice.depth, context)
            choice = choice.for_some(self.gains.worth_drafting(requests, least), len(requests))
        return choice

    @property
    def parked(self) -> bool:
        """Whether speculation rests because plain steps are faster."""
        return isinstance(self.policy, AutoPolicy) and self.policy.parked

    def took(self, choice: Choice, requests: int, num_tokens: int) -> None:
        """The step under way verifies this many tokens; its time is a whole batch's, unless it drafts for some only.

        Args:
            num_tokens: rows of the verify forward, those of padding included: what a tier costs is known by its size.
        """
        usual = choice.drafted is None and not choice.has_copies
        # A plain step is known by its requests, however many rows they are padded to.
        num_tokens = num_tokens if choice.depth else requests
        self.clock.took(StepKind(requests, num_tokens, choice.depth, self._context) if usual else None)

    def survival(
        self, logits: torch.Tensor | None, bs: int, depth: int, coefficients: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[bs, depth] calibrated probability that a draft and all before it are accepted.

        Args:
            logits: [bs, depth] of the confidence head; None without one.
            coefficients: the attribute's copy in a CUDA graph; None reads the attribute.
        """
        scale, shift = (self.coefficients if coefficients is None else coefficients)[:, :depth]
        conditional = scale.expand(bs, depth) if logits is None else torch.sigmoid(logits * scale + shift)
        # A parallel product may rise in the last bit, and a draft must never rank before its predecessor. A NaN, from a
        # broken head, would not rank at all.
        return conditional.nan_to_num(0.0).cumprod(1).cummin(1).values

    def predict(
        self, logits: torch.Tensor | None, bs: int, depth: int, coefficients: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[2, bs, depth] the logits, NaN without a head, and the survivals of :meth:`survival`."""
        survival = self.survival(logits, bs, depth, coefficients)
        return torch.stack([torch.full_like(survival, torch.nan) if logits is None else logits, survival])

    def ranked(self, choice: Choice, drafted: Drafted) -> torch.Tensor:
        """[bs, width of the block] what drafts are ranked by: their survival, but for what the choice singles out."""
        bs, width = len(drafted.depths), drafted.width
        # A policy without confidences ranks drafts only to keep them within limits, which leave no choice.
        survival = torch.ones((bs, width), device=self.device) if drafted.survival is None else drafted.survival
        survival = torch.nn.functional.pad(survival, (0, width - survival.shape[1]), value=_EXCLUDED)
        if choice.drafted is not None:
            left_out = host_index([r for r in range(bs) if r not in choice.drafted], self.device)
            survival = survival.index_fill(0, left_out, _EXCLUDED)
        if choice.forced is not None:
            survival = survival.clone()
            survival[choice.forced] = _FORCED
        if choice.limits is not None:
            allowed, copied = self._allowed(choice.limits, drafted)
            survival = torch.where(allowed, survival.masked_fill(copied, _FORCED), _EXCLUDED)
        return survival

    def _allowed(self, limits: Limits, drafted: Drafted) -> tuple[torch.Tensor, torch.Tensor]:
        """[bs, width] bool each: drafts within the limits, always leading ones, and those of them that are copied."""
        slots = torch.arange(drafted.width, device=self.device)
        most, num_copied = host_index((limits.most, limits.copied), self.device)
        allowed, copied = slots < most[:, None], slots < num_copied[:, None]
        if limits.thresholds is not None:
            assert drafted.raw_confidence is not None
            least = host_floats(limits.thresholds, self.device)[:, None]
            lens = above_threshold(drafted.raw_confidence, least)
            allowed &= copied | (slots < lens[:, None])
        return allowed, copied

    def verify_lens(self, choice: Choice, drafted: Drafted, step: int) -> tuple[torch.Tensor, int]:
        """Verify lengths of a drafted step, and their sum.

        Args:
            step: number of the engine's step.

        Returns:
            ``(verify_lens [bs] int64 on the device, sum on the host)``; the policies that need live values on the host
            wait for the device.
        """
        bs, depth = len(drafted.depths), choice.depth
        match choice.rule:
            case Rule.TOP:
                lens = top_prefixes(self.ranked(choice, drafted), choice.budget)
                return lens, choice.budget if choice.fixes_total else int(lens.sum())
            case Rule.THRESHOLD:
                assert drafted.raw_confidence is not None
                assert self.options.confidence_threshold is not None
                lens = above_threshold(drafted.raw_confidence, self.options.confidence_threshold)
                lens = self._within(choice, drafted, lens)
                return lens, int(lens.sum())
            case Rule.EARLY_STOP:
                assert self.times is not None
                assert drafted.survival is not None
                step_ms = self.times.by_drafts(bs, depth, self._context)
                survival = drafted.survival
                if choice.limits is not None:
                    allowed, copied = self._allowed(choice.limits, drafted)
                    survival = torch.where((allowed & ~copied)[:, :depth], survival, _EXCLUDED)
                host_lens = early_stop(survival.double().cpu().numpy(), step_ms)
            case _:
                host_lens = list(random_lens(depth, bs, step))
        lens = torch.tensor(host_lens, device=self.device)
        if choice.limits is None:
            return lens, sum(host_lens)
        lens = self._within(choice, drafted, lens)
        return lens, int(lens.sum())

    def _within(self, choice: Choice, drafted: Drafted, lens: torch.Tensor) -> torch.Tensor:
        """Lengths [bs] of a live rule, cut to what the requests allow; copied drafts whole."""
        if choice.limits is None:
            return lens
        allowed, copied = self._allowed(choice.limits, drafted)
        return torch.where(copied.any(1), allowed.sum(1), torch.minimum(lens, allowed.sum(1)))

    def observe(self, rounds: Rounds, running: list[int], accept_lens: list[int]) -> None:
        """Take note of a step's outcome, and learn from several at a time: each lesson has a price of its own.

        Args:
            running: requests of the step that it was meant for.
            accept_lens: drafts accepted, of these.
        """
        drafted = [i for i, request in enumerate(running) if rounds.drafted[request]]
        if not drafted:
            return
        if isinstance(self.policy, AdaptiveBlockPolicy):
            verified = rounds.verify_lens.tolist()
            self.policy.observe(sum(verified[running[i]] for i in drafted), sum(accept_lens[i] for i in drafted))
        self._notes.append(Note(rounds, [running[i] for i in drafted], [accept_lens[i] for i in drafted]))
        # A parked server's probe is all that it gets to see for long.
        if len(self._notes) >= LEARN_STEPS or rounds.choice.weight > 1:
            self.learn()

    def learn(self) -> None:
        """Learn from what was noted."""
        notes, self._notes = self._notes, []
        if not notes:
            return
        self.positions.observe(*weighted(notes, *outcomes_of(notes)))
        predicted = [note for note in notes if note.rounds.predictions is not None]
        if self.calibration is None:
            self._renew_coefficients()
        if not predicted:
            return
        # Depths differ where policies cut blocks short.
        logits, survival = (
            np.concatenate([note.prediction(which, self.max_verify) for note in predicted]) for which in (0, 1)
        )
        self.predicted.observe(survival, *outcomes_of(predicted))
        renewed = self.calibration is None
        if self.calibration is not None and self.options.online_calibration:
            # What lies past the drafted depth was not verified, and is not read.
            counted = weighted(predicted, np.nan_to_num(logits), *outcomes_of(predicted))
            self.calibration.observe(*counted, num_steps=sum(note.rounds.choice.weight for note in predicted))
            if renewed := self.calibration.num_refits != self._num_refits:
                self._num_refits = self.calibration.num_refits
                self._renew_coefficients()
        if self.survivals is not None:
            ids = [note.rounds.requests[request] for note in predicted for request in note.requests]
            self.gains.observe(ids, survival, float(self.survivals.mean().sum()))
            self._observe_survivals(self.survivals, np.stack(weighted(predicted, logits, survival)), renewed)

    def _observe_survivals(self, survivals: LaggedSurvivals, predictions: Array, renewed: bool) -> None:
        """Add rounds [2, n, max_verify], logits and survivals, to those that budgets are based on.

        When confidences are ``renewed``, all of them are predicted again: a drafter that promises what never comes
        would otherwise be believed until its last promise has left the window.
        """
        survivals.observe(predictions[1])
        self._predictions = np.concatenate([self._predictions, predictions], axis=1)[:, -WINDOW_ROUNDS:]
        if renewed:
            survivals.revise(self._predict_again(*self._predictions))

    def _predict_again(self, logits: Array, survival: Array) -> Array:
        """[n, max_verify] survivals of earlier rounds as they would be predicted now; NaN past the drafted depth."""
        if self.calibration is None:
            return np.where(np.isnan(survival), np.nan, self.positions.conditional().cumprod())
        again = prefix_survival(sigmoid(self.calibration.scale * logits + self.calibration.shift))
        # A broken head's NaN was predicted to be rejected, and stays that.
        return np.where(np.isnan(logits), survival, again)

    def _renew_coefficients(self) -> None:
        """The last ones are kept: a forward that was launched may not have read them yet."""
        self._last_coefficients, self.coefficients = self.coefficients, self._copy_coefficients()

    def _copy_coefficients(self) -> torch.Tensor:
        """[2, max_verify] scale and shift of the calibration; without a head, acceptance by position in row 0."""
        if self.calibration is None:
            host = torch.from_numpy(np.stack([self.positions.conditional(), np.zeros(self.max_verify)])).float()
        else:
            host = torch.from_numpy(np.stack([self.calibration.scale, self.calibration.shift])).float()
        if self.device.type == "cuda":
            host = host.pin_memory()
        return host.to(self.device, non_blocking=True)

    def report(self) -> dict[str, Any]:
        """JSON for the statistics."""
        self.learn()
        return {
            "policy": self.policy.name,
            "schedule": self.policy.report(),
            "calibration": None if self.calibration is None else self.calibration.report(),
        }
