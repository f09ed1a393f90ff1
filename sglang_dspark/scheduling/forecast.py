"""How likely drafts are to survive verification: foretold by the confidence head, corrected by what came of them."""

from __future__ import annotations

from collections import deque

import numpy as np
import torch
from dspark_kernels import to_device
from numpy.typing import NDArray

from sglang_dspark.calibration.online import OnlineCalibration
from sglang_dspark.calibration.predicted_survival import PredictedSurvival
from sglang_dspark.calibration.survival import prefix_survival, sigmoid
from sglang_dspark.scheduling.lagged_survival import WINDOW_ROUNDS, LaggedSurvivals
from sglang_dspark.scheduling.position_acceptance import PositionAcceptance
from sglang_dspark.scheduling.request_acceptance import RequestAcceptance
from sglang_dspark.scheduling.step_feedback import StepFeedback, verified_and_accepted, weighted
from sglang_dspark.step.confidence import Confidence

# Learning from a step costs 0.1 ms however few requests it had: so many steps are taken together, or so many rounds. Of
# 256 requests every 16th step is noted, and a server that should park would wait for eight of these.
UPDATE_STEPS = 8
UPDATE_ROUNDS = 128
ROUNDS_PER_STEP = 16
"""Rounds per step that are learned from in the mean: 64 requests would fill what survivals are estimated from
(``WINDOW_ROUNDS``) in four steps, and every round costs 2 us."""


class Forecast:
    """Predicts survivals, and learns from outcomes.

    Args:
        max_verify: most drafts that a step may verify per request.
        calibration: of the confidence head; None without one: survivals are the running acceptance by position then.
        adapts: whether the calibration follows the outcomes.
        device: where confidences live.

    Attributes:
        coefficients: [2, max_verify] float32, scale and shift of the calibration; without a confidence head, acceptance
            by position in row 0.
        positions: acceptance by position.
        predicted: survivals as they were predicted, against what came of them.
        gains: what the drafts of every request bring.
        lagged: survivals of the last rounds, which budgets are based on; None until the schedule has a table of step
            times to weigh them with.
    """

    def __init__(
        self, max_verify: int, calibration: OnlineCalibration | None, *, adapts: bool, device: torch.device
    ) -> None:
        self.calibration = calibration
        self.positions = PositionAcceptance(max_verify)
        self.predicted = PredictedSurvival(max_verify)
        self.request_acceptance = RequestAcceptance()
        self.lagged: LaggedSurvivals | None = None
        self._max_verify, self._adapts, self._device = max_verify, adapts, device
        self._notes: list[StepFeedback] = []
        self._ahead = 0  # rounds noted of steps to come
        self._steps = 0  # since the calibration was shown anything
        self._predictions = np.empty((2, 0, max_verify))  # the last rounds: logits, and survivals as predicted
        self._num_refits = 0
        self.coefficients = self._copy_coefficients()
        self._earlier_coefficients: deque[torch.Tensor] = deque(maxlen=2)

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
    ) -> Confidence:
        """The logits, and the survivals of :meth:`survival`."""
        return Confidence(logits, self.survival(logits, bs, depth, coefficients))

    def note(self, outcome: StepFeedback) -> None:
        """Take note of a step's outcome, and learn from several at a time: each lesson has a price of its own.

        Of steps with many requests only some are noted, whatever came of them.
        """
        # A parked server's probe is all that it gets to see for long.
        counts_for_many = outcome.rounds.decision.weight > 1
        self._count_step()
        if self._ahead and not counts_for_many:
            return
        self._ahead += len(outcome.requests)
        self._notes.append(outcome)
        rounds = sum(len(note.requests) for note in self._notes)
        if (
            len(self._notes) >= UPDATE_STEPS
            or rounds >= UPDATE_ROUNDS
            or counts_for_many
            or self._is_first_look(outcome)
        ):
            self.learn()

    def _is_first_look(self, outcome: StepFeedback) -> bool:
        """Return whether this is one of the first rounds of a request that runs alone.

        Its text decides about every step, so a hard one is given up soon. Without a head all texts look the same.
        """
        requests = outcome.rounds.requests
        weighed = self.calibration is not None and self.lagged is not None
        return weighed and len(requests) == 1 and self.request_acceptance.is_new(requests[0])

    def note_plain(self) -> None:
        """Take note of a step that drafted nothing.

        What was drafted before it may have been a trial, and not much else may follow that could be learned from.
        """
        self._count_step()
        self.learn()

    def _count_step(self) -> None:
        self._steps += 1
        self._ahead = max(0, self._ahead - ROUNDS_PER_STEP)

    def learn(self) -> None:
        """Learn from what was noted."""
        notes, self._notes = self._notes, []
        if not notes:
            return
        self.positions.observe(*weighted(notes, *verified_and_accepted(notes)))
        predicted = [note for note in notes if note.rounds.confidence is not None]
        if self.calibration is None:
            self._renew_coefficients()
        if not predicted:
            return
        # Depths differ where policies cut blocks short.
        logits, survival = np.concatenate([note.confidence(self._max_verify) for note in predicted], axis=1)
        self.predicted.observe(survival, *verified_and_accepted(predicted))
        renewed = self.calibration is None or self._calibrate(self.calibration, predicted, logits)
        if self.lagged is not None:
            ids = [note.rounds.requests[request] for note in predicted for request in note.requests]
            self.request_acceptance.observe(ids, survival)
            # A probe of a whole batch shows as many rounds as it stands for, or more.
            times = [-(-note.rounds.decision.weight // len(note.requests)) for note in predicted for _ in note.requests]
            predictions = np.repeat(np.stack([logits, survival]), times, axis=1)
            self._observe_survivals(self.lagged, predictions, renewed)

    def _calibrate(
        self, calibration: OnlineCalibration, notes: list[StepFeedback], logits: NDArray[np.float64]
    ) -> bool:
        """Show the calibration what came of ``logits`` [n, max_verify]; whether that changed the coefficients."""
        if not self._adapts:
            return False
        verified, accepted = verified_and_accepted(notes)
        # NaN past the drafted depth was not verified, and is not read; that of a broken head is left out.
        read = np.where(np.arange(self._max_verify) < verified[:, None], logits, 0.0)
        counted = weighted(notes, read, verified, accepted)
        calibration.observe(*counted, num_steps=self._steps)
        if verified.any():
            self._steps = 0
        if calibration.num_refits == self._num_refits:
            return False
        self._num_refits = calibration.num_refits
        self._renew_coefficients()
        return True

    def _observe_survivals(self, lagged: LaggedSurvivals, predictions: NDArray[np.float64], renewed: bool) -> None:
        """Add rounds [2, n, max_verify], logits and survivals, to those that budgets are based on.

        When confidences are ``renewed``, all of them are predicted again: a drafter that promises what never comes
        would otherwise be believed until its last promise has left the window.
        """
        lagged.observe(predictions[1])
        self._predictions = np.concatenate([self._predictions, predictions], axis=1)[:, -WINDOW_ROUNDS:]
        if renewed:
            lagged.revise(self._predict_again(*self._predictions))

    def _predict_again(self, logits: NDArray[np.float64], survival: NDArray[np.float64]) -> NDArray[np.float64]:
        """[n, max_verify] survivals of earlier rounds as they would be predicted now; NaN past the drafted depth."""
        if self.calibration is None:
            return np.where(np.isnan(survival), np.nan, self.positions.conditional().cumprod())
        again = prefix_survival(sigmoid(self.calibration.scale * logits + self.calibration.shift))
        # A broken head's NaN was predicted to be rejected, and stays that.
        return np.where(np.isnan(logits), survival, again)

    def _renew_coefficients(self) -> None:
        """Replace the coefficients, and keep those before: a forward that was launched may not have read them yet.

        Behind one forward they are renewed twice if statistics are asked for just before a result is read.
        """
        self._earlier_coefficients.append(self.coefficients)
        self.coefficients = self._copy_coefficients()

    def _copy_coefficients(self) -> torch.Tensor:
        if self.calibration is None:
            host = torch.from_numpy(np.stack([self.positions.conditional(), np.zeros(self._max_verify)])).float()
        else:
            host = torch.from_numpy(np.stack([self.calibration.scale, self.calibration.shift])).float()
        return to_device(host, self._device)
