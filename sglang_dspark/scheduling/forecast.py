"""Predicts which drafts survive verification, from what earlier steps have shown.

The budget of a step has to be fixed before its drafts are drawn, or it would depend on them. So it is chosen from the
survivals of earlier rounds: the last rounds are dealt into imagined batches of the present size, and a budget of K
drafts is worth the mean, over these batches, of the sum of their K largest survivals. (DSpark, 5.2)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from dspark_kernels import MOST_MATCH, NUM_ROWS, Candidates, block_survival, to_device
from numpy.typing import NDArray

from sglang_dspark.scheduling.online_calibration import ChainWeights, OnlineCalibration, PredictedSurvival
from sglang_dspark.scheduling.sts import LogisticMap, prefix_survival, reached, sigmoid, survived
from sglang_dspark.step.decision import StepRecord
from sglang_dspark.step.state import Confidence

WINDOW_ROUNDS = 256
"""Rounds that an estimate averages over: a standard error of about 4 % of the expected accepted drafts. A single batch
if more requests than this run."""
# Before the first round, a middling drafter: conditional acceptance, and rounds that this counts for, few enough to be
# outweighed by the time that a server may park.
PRIOR_ACCEPTANCE, PRIOR_ROUNDS = 0.7, 16


class LaggedSurvivals:
    """The survivals of the last drafted rounds of all requests.

    Args:
        gamma: drafts per block.
        depths: block depths that :meth:`gains` tells apart, ascending, the last one gamma.

    Attributes:
        num_observed: rounds ever observed.
    """

    def __init__(self, gamma: int, depths: tuple[int, ...]) -> None:
        self.depths = depths
        self.num_observed = 0
        self._rounds = np.tile(PRIOR_ACCEPTANCE ** np.arange(1.0, gamma + 1), (PRIOR_ROUNDS, 1))
        self._gains: dict[int, NDArray[np.float64]] = {}

    def observe(self, survival: NDArray[np.float64]) -> None:
        """Append rounds [n, gamma] of calibrated survivals, whole blocks or blocks cut short.

        A cut block says nothing about the positions past its end (NaN there): they are filled with the mean ratio of
        the rounds at hand.
        """
        self._rounds = np.concatenate([self._rounds, self._whole(survival)])[-max(WINDOW_ROUNDS, len(survival)) :]
        self.num_observed += len(survival)
        self._gains.clear()

    def revise(self, survival: NDArray[np.float64]) -> None:
        """Take rounds observed before as they would be predicted now, and forget all others, the prior too."""
        self._rounds = self._whole(survival)
        self._gains.clear()

    def _whole(self, survival: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return ``survival`` with cut blocks completed."""
        if not np.isnan(survival).any():
            return survival
        mean = self.mean()
        ratio = mean[1:] / np.maximum(mean[:-1], 1e-9)
        survival = survival.copy()
        for position in range(1, survival.shape[1]):
            column, before = survival[:, position], survival[:, position - 1]
            np.copyto(column, before * ratio[position - 1], where=np.isnan(column))
        return survival

    def mean(self) -> NDArray[np.float64]:
        """Return [gamma] the mean survival by position over the rounds that estimates use."""
        return self._rounds[-WINDOW_ROUNDS:].mean(0)

    def gains(self, requests: int) -> NDArray[np.float64]:
        """Return [depths, requests * gamma + 1] the expected accepted drafts of a batch by block depth and budget.

        A budget past ``requests * depth`` is worth no more than that.
        """
        if requests not in self._gains:
            self._gains[requests] = self._estimate(requests)
        return self._gains[requests]

    def _estimate(self, requests: int) -> NDArray[np.float64]:
        gamma = self._rounds.shape[1]
        num_batches = max(1, min(WINDOW_ROUNDS, len(self._rounds)) // requests)
        rounds = self._rounds[-num_batches * requests :]
        if len(rounds) < requests:
            rounds = np.resize(rounds, (requests, gamma))
        # Sorted ascending, hence negated. Single precision is enough here, and twice as fast.
        batches = -rounds.reshape(num_batches, requests, gamma).swapaxes(1, 2).astype(np.float32)
        by_depth = np.zeros((len(self.depths), *batches.shape), dtype=np.float32)
        for allowed, depth in zip(by_depth, self.depths, strict=True):
            allowed[:, :depth] = batches[:, :depth]
        worth = by_depth.reshape(len(self.depths), num_batches, -1)
        worth.sort(axis=2)
        gains = np.zeros((len(self.depths), requests * gamma + 1))
        worth.sum(1).cumsum(1, dtype=np.float64, out=gains[:, 1:])
        gains /= -num_batches
        return gains


@dataclass(frozen=True)
class StepFeedback:
    """The outcome of a step.

    Attributes:
        record: of the step.
        requests: indices of its requests that were drafted and are still running.
        accept_lens: drafts accepted of each.
    """

    record: StepRecord
    requests: list[int]
    accept_lens: list[int]

    def confidence(self, width: int) -> NDArray[np.float64]:
        """Return [2, n, width] logits and survivals, NaN past the drafted depth."""
        confidence = self.record.confidence
        assert confidence is not None
        depth = confidence.survival.shape[1]
        padded = np.full((2, len(self.requests), width), np.nan)
        if confidence.logits is not None:
            padded[0, :, :depth] = confidence.logits.numpy()[self.rows]
        padded[1, :, :depth] = confidence.survival.numpy()[self.rows]
        return padded

    def chains(self) -> list[NDArray[np.int64]]:
        """Return of the requests, [n] each, what :meth:`ChainWeights.observe` learns from."""
        assert self.record.chains is not None
        assert self.record.committed is not None
        rows, _, candidates = Candidates.parts(self.record.chains.numpy()[self.rows])
        committed = self.record.committed.numpy()[self.rows]
        width = min(candidates.shape[1], committed.shape[1])
        lengths = (candidates[:, :width] >= 0).cumprod(1).sum(1)
        seen = np.minimum(np.asarray(self.accept_lens) + 1, lengths)
        right = (candidates[:, :width] == committed[:, :width]).cumprod(1).sum(1)
        return [rows, np.minimum(right, seen), seen]

    @property
    def rows(self) -> slice | list[int]:
        """Return an index of the requests: a slice, which is much faster than a list, if they are all of the step's."""
        return slice(None) if len(self.requests) == len(self.record.requests) else self.requests


def verified_and_accepted(feedback: Sequence[StepFeedback]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the drafts verified and accepted, [n] each, of all requests of all steps.

    None are of a round in which a preset copied: it says nothing about the drafter.
    """
    verified = np.concatenate([step.record.verify_lens.numpy()[step.rows] for step in feedback])
    drawn = np.concatenate([np.array(step.record.from_request)[step.rows] == 0 for step in feedback])
    return verified * drawn, np.concatenate([step.accept_lens for step in feedback]) * drawn


def repeat_by_weight(feedback: Sequence[StepFeedback], *columns: NDArray[Any]) -> list[NDArray[Any]]:
    """Return ``columns`` [n, ...] of all requests of all steps, each request as often as a round of its step counts."""
    weights = [step.record.decision.weight for step in feedback for _ in step.requests]
    return list(columns) if max(weights) == 1 else [np.repeat(column, weights, axis=0) for column in columns]


# An update costs 0.1 ms however few rounds it has, and 2 us for each: so many steps share one, or so many rounds, of
# which a server that should park is not to wait for more.
UPDATE_STEPS = 8
UPDATE_ROUNDS = 128


class PositionAcceptance:
    """Running share of drafts accepted at each position, among those whose predecessors were all accepted.

    The survival estimate of drafters without a confidence head.
    """

    def __init__(self, gamma: int) -> None:
        self._judged = np.full(gamma, float(PRIOR_ROUNDS))
        self._accepted = np.full(gamma, PRIOR_ROUNDS * PRIOR_ACCEPTANCE)

    def observe(self, verified: NDArray[np.int64], accepted: NDArray[np.int64]) -> None:
        """Add rounds: [n] drafts verified and [n] accepted. Older drafts count for less."""
        judged = reached(verified, accepted, len(self._judged))
        kept = judged & survived(accepted, len(self._judged))
        count = judged.sum(0)
        keep = np.exp(-count / WINDOW_ROUNDS)
        self._judged = self._judged * keep + count
        self._accepted = self._accepted * keep + kept.sum(0)

    def conditional(self) -> NDArray[np.float64]:
        """Return [gamma] the probability that a draft is accepted, given that all before it are."""
        return self._accepted / self._judged


class Forecast:
    """Predicts survivals, and learns from outcomes.

    Args:
        max_verify: maximum of drafts that a step may verify per request.
        calibration: of the confidence head; None without one, and survivals are the running acceptance by position.
        adapts: whether the calibration follows the outcomes.
        device: where confidences live.

    Attributes:
        packed_coefficients: [2 + 2 * NUM_ROWS, max_verify] float32, what :func:`split_coefficients` takes apart, in one
            tensor so that one copy renews it.
        in_one_launch: whether a GPU computes survivals with our kernel, and not as torch does.
        positions: acceptance by position.
        predicted: survivals as they were predicted, of the same drafts as the outcomes.
        lagged: survivals of the last rounds, on which budgets are based; None until the schedule has step times.
    """

    def __init__(
        self, max_verify: int, calibration: OnlineCalibration | None, *, adapts: bool, device: torch.device
    ) -> None:
        self.calibration = calibration
        self.in_one_launch = True
        self.predicted = PredictedSurvival(max_verify)
        self.lagged: LaggedSurvivals | None = None
        self._max_verify, self._adapts, self._device = max_verify, adapts, device
        self._earlier: deque[torch.Tensor] = deque(maxlen=2)
        self._begin()
        self.packed_coefficients = self._copy_coefficients()

    def _begin(self) -> None:
        """Know nothing of any outcome."""
        self.positions = PositionAcceptance(self._max_verify)
        self._lone_request, self._lone_rounds = "", 0  # the last one that ran alone, and what was learned from then
        self._pending: list[StepFeedback] = []
        self._rounds_ahead = 0  # that were kept of more than their share of steps
        self._steps = 0  # since the calibration was shown anything
        self._predictions = np.empty((2, 0, self._max_verify))  # the last rounds: logits, and survivals as predicted
        self._num_refits = 0
        self._chains = ChainWeights(MOST_MATCH + self._max_verify)

    def forget(self, lagged: LaggedSurvivals | None, *, new_drafter: bool) -> None:
        """Forget all outcomes: other weights draft or verify from now on. The sums of ``predicted`` go on.

        Args:
            lagged: survivals without any rounds.
            new_drafter: whether the temperatures that were read are of another drafter.
        """
        self.lagged = lagged
        if self.calibration is not None:
            self.calibration = self.calibration.afresh(tempered=not new_drafter)
        self._begin()
        self.renew()

    @property
    def weights(self) -> torch.Tensor:
        """Return [2, NUM_ROWS, max_verify], the other part of :attr:`packed_coefficients`."""
        return split_coefficients(self.packed_coefficients)[1]

    def predict(
        self, logits: torch.Tensor | None, bs: int, depth: int, coefficients: torch.Tensor | None = None
    ) -> Confidence:
        """Return ``logits``, and the calibrated survivals of :func:`dspark_kernels.block_survival`.

        Args:
            logits: [bs, depth] of the confidence head; None without one.
            coefficients: [2, max_verify], the copy of :attr:`packed_coefficients` in a CUDA graph; None reads that one.
        """
        chosen = split_coefficients(self.packed_coefficients)[0] if coefficients is None else coefficients
        survivals = block_survival if self.in_one_launch else block_survival.reference
        return Confidence(logits, survivals(chosen[:, :depth], logits, bs))

    def observe(self, feedback: StepFeedback) -> None:
        """Keep the outcome of a step, and update from several at a time.

        Of steps with many requests only some are kept, whatever came of them: as many rounds per step as an update of
        :data:`UPDATE_STEPS` steps may have.
        """
        # For long, a parked server's probe is all that it gets to see.
        is_parked_probe = feedback.record.decision.weight > 1
        self._count_step()
        if self._rounds_ahead and not is_parked_probe:
            return
        self._rounds_ahead += len(feedback.requests)
        self._pending.append(feedback)
        rounds = sum([len(step.requests) for step in self._pending])
        is_full = len(self._pending) >= UPDATE_STEPS or rounds >= UPDATE_ROUNDS
        if is_full or is_parked_probe or self._is_new_text(feedback):
            self.update()

    def _is_new_text(self, feedback: StepFeedback) -> bool:
        """Return whether this is one of the first rounds of a request that runs alone.

        Its text decides about every step, so a hard one is given up soon.
        """
        requests = feedback.record.requests
        if self.lagged is None or len(requests) > 1:
            return False
        if requests[0] != self._lone_request:
            self._lone_request, self._lone_rounds = requests[0], 0
        # Without survivals, only what is copied is learned from, and at once.
        self._lone_rounds += feedback.record.confidence is not None
        return self._lone_rounds <= UPDATE_STEPS

    def observe_plain(self) -> None:
        """Account for a step that drafted nothing: little may follow the trial before it that could be learned from."""
        self._count_step()
        self.update()

    def _count_step(self) -> None:
        self._steps += 1
        self._rounds_ahead = max(0, self._rounds_ahead - UPDATE_ROUNDS // UPDATE_STEPS)

    def update(self) -> None:
        """Learn from the outcomes that were kept."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        if chained := [step for step in pending if step.record.has_chain]:
            self._chains.observe(*map(np.concatenate, zip(*(step.chains() for step in chained), strict=True)))
        self.positions.observe(*repeat_by_weight(pending, *verified_and_accepted(pending)))
        predicted = [step for step in pending if step.record.confidence is not None]
        renewed = self._learn_survivals(predicted) if predicted else self.calibration is None
        if renewed or chained:
            self.renew()

    def _learn_survivals(self, predicted: list[StepFeedback]) -> bool:
        """Learn from outcomes that were predicted, and return whether the same logits mean something else now."""
        # Depths differ where policies cut blocks short.
        logits, survival = np.concatenate([step.confidence(self._max_verify) for step in predicted], axis=1)
        self.predicted.observe(survival, *verified_and_accepted(predicted))
        renewed = self.calibration is None or self._calibrate(self.calibration, predicted, logits)
        if self.lagged is not None:
            # A probe of a whole batch shows as many rounds as it stands for, or more.
            times = [-(-step.record.decision.weight // len(step.requests)) for step in predicted for _ in step.requests]
            predictions = np.repeat(np.stack([logits, survival]), times, axis=1)
            self.lagged.observe(predictions[1])
            self._predictions = np.concatenate([self._predictions, predictions], axis=1)[:, -WINDOW_ROUNDS:]
            if renewed:
                # An overconfident drafter would be believed until its last early round has left the window.
                self.lagged.revise(self._predict_again(*self._predictions))
        return renewed

    def _calibrate(
        self, calibration: OnlineCalibration, feedback: list[StepFeedback], logits: NDArray[np.float64]
    ) -> bool:
        """Show the calibration the outcomes of ``logits`` [n, max_verify], and return if that changed it."""
        if not self._adapts:
            return False
        verified, accepted = verified_and_accepted(feedback)
        # NaN past the drafted depth was not verified, and is not read; that of a broken head is left out.
        read = np.where(np.arange(self._max_verify) < verified[:, None], logits, 0.0)
        counted = repeat_by_weight(feedback, read, verified, accepted)
        calibration.observe(*counted, num_steps=self._steps)
        if verified.any():
            self._steps = 0
        if calibration.num_refits == self._num_refits:
            return False
        self._num_refits = calibration.num_refits
        return True

    def _predict_again(self, logits: NDArray[np.float64], survival: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return [n, max_verify] survivals of earlier rounds as predicted now; NaN past the drafted depth."""
        if self.calibration is None:
            return np.where(np.isnan(survival), np.nan, self.positions.conditional().cumprod())
        again = prefix_survival(sigmoid(self.calibration.scale * logits + self.calibration.shift))
        # A broken head's NaN was predicted to be rejected, and stays that.
        return np.where(np.isnan(logits), survival, again)

    def renew(self) -> None:
        """Replace what was learned, and keep what was before: a forward that was launched may not have read it yet.

        After one forward it is renewed twice if statistics are asked for just before a result is read.
        """
        self._earlier.append(self.packed_coefficients)
        self.packed_coefficients = self._copy_coefficients()

    def _copy_coefficients(self) -> torch.Tensor:
        nothing = np.zeros(self._max_verify)
        fitted = self.calibration or LogisticMap(nothing + 1, nothing)
        weights = self._chains.table(fitted.scale, fitted.shift)
        scale = self.positions.conditional() if self.calibration is None else fitted.scale
        rows = np.concatenate([[scale, fitted.shift], *weights])
        return to_device(torch.from_numpy(rows).float(), self._device)


def split_coefficients(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two views of :attr:`Forecast.packed_coefficients`.

    The first is [2, max_verify], scale and shift of the calibration; without a confidence head, acceptance by position
    in row 0. The second is [2, NUM_ROWS, max_verify], the weights of :class:`dspark_kernels.Candidates`.
    """
    return packed[:2], packed[2:].view(2, NUM_ROWS, packed.shape[1])
