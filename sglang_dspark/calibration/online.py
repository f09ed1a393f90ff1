"""Calibration that follows the running server: fitted to what verification observed, refitted as it goes on."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from sglang_dspark.calibration.logistic import LogisticMap
from sglang_dspark.calibration.metrics import ece
from sglang_dspark.calibration.sts import StsCalibration
from sglang_dspark.calibration.survival import Bools, Floats, Ints, prefix_survival, reached, sigmoid, survived

WINDOW_PAIRS = 1024
"""Pairs per position that a fit sees. The acceptance it finds is off by 0.4 / sqrt(1024) = 0.0125 at 0.8; half the
window would follow a change of workload twice as fast and be off by 0.018."""
FIRST_REFIT_ROUNDS = 8
REFIT_ROUNDS = 64
REFIT_STEPS = 16
"""A refit needs this many new rounds and this many steps: with few requests the first limit counts, with many the
second keeps its cost, about 0.4 ms with 64 requests, below 30 us per step. The first fits need fewer rounds, the very
first one 8 rounds in any number of steps, the next as many as there were before: a head that is far off costs a lone
user most of the throughput until it is corrected."""
NEWTON_STEPS = 4
"""Per refit; each starts where the last one ended."""
REPORT_ROUNDS = 4096
"""Rounds behind the reported errors. With 20 bins even perfect predictions show an ECE of up to 0.02 on that many."""


class PositionWindow:
    """The most recent values at every position of the block: a ring buffer for each.

    Positions fill at different speeds: a draft is only seen where all before it were accepted.

    Attributes:
        values: one [gamma, capacity] float64 array per field, in no particular order along a row.
        filled: [gamma] how many of the first entries of a row hold values; the others are 0.
        seen: [gamma] values ever appended.
    """

    def __init__(self, gamma: int, capacity: int, num_fields: int) -> None:
        self.values = [np.zeros((gamma, capacity)) for _ in range(num_fields)]
        self.seen = np.zeros(gamma, dtype=np.int64)
        self._capacity = capacity
        self._row_starts = np.arange(gamma) * capacity

    @property
    def filled(self) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        return np.minimum(self.seen, self._capacity)

    def append(self, mask: Bools, *fields: Floats | Bools) -> None:
        """Add the entries where ``mask`` is set, oldest row first.

        Args:
            mask: [n, gamma]
            fields: one [n, gamma] array per field.
        """
        order = np.cumsum(mask, axis=0) - 1
        counts = mask.sum(axis=0)
        # Of more entries than fit, the oldest would be overwritten in an undefined order.
        newest = mask & (order >= counts - self._capacity)
        slots = (self._row_starts + (self.seen + order) % self._capacity)[newest]
        for stored, added in zip(self.values, fields, strict=True):
            stored.reshape(-1)[slots] = added[newest]
        self.seen += counts


class OnlineCalibration:
    """Bounded logistic recalibration per position, ``c_k = sigmoid(scale_k * z_k + shift_k)``.

    A temperature alone can stretch a head's logits but not move them, hence the shift. Starts from STS temperatures
    (``scale = 1 / T``, ``shift = 0``) and is pulled towards them by a ridge. Deterministic.

    Attributes:
        scale: [gamma] float64; replaced, never written to, by the calls of :meth:`observe` that refit.
        shift: [gamma] float64, likewise.
        num_refits: how often they were replaced.
    """

    @classmethod
    def from_file(cls, path: str | None, drawn: int, max_verify: int) -> Self:
        """Begin with the temperatures of a file, which is for blocks of ``drawn`` drafts; without one, with 1."""
        temperatures = () if path is None else StsCalibration.load(Path(path), drawn).temperatures[:max_verify]
        return cls(max_verify, (*temperatures, *[1.0] * (max_verify - len(temperatures))), drawn)

    def __init__(self, gamma: int, initial: Sequence[float] | None = None, drawn: int | None = None) -> None:
        """Start without observations.

        Args:
            gamma: drafts per round.
            initial: gamma temperatures, :attr:`StsCalibration.temperatures`; None means all 1.
            drawn: leading ones that the head is asked about, if the others are copied; None means all.
        """
        self._gamma, self._initial, self._drawn = gamma, initial, gamma if drawn is None else drawn
        self._start_scale = 1.0 / (np.ones(gamma) if initial is None else np.asarray(initial, dtype=np.float64))
        self._map = LogisticMap(self._start_scale, np.zeros(gamma))
        self.num_refits = 0
        self._pending: list[tuple[Floats, Ints, Ints]] = []
        self._new_rounds = self._new_steps = 0
        self._refit_rounds = FIRST_REFIT_ROUNDS
        self._pairs = PositionWindow(gamma, WINDOW_PAIRS, num_fields=2)
        # Of the last rounds: conditional acceptance as predicted, drafts verified and accepted.
        self._history: list[Any] = [np.zeros((0, gamma)), np.zeros(0, np.int64), np.zeros(0, np.int64)]

    def afresh(self, *, tempered: bool) -> Self:
        """Return one without observations, which starts with the same temperatures, or with 1."""
        return type(self)(self._gamma, self._initial if tempered else None, self._drawn)

    @property
    def scale(self) -> Floats:
        return self._map.scale

    @property
    def shift(self) -> Floats:
        return self._map.shift

    def observe(
        self, logits: npt.ArrayLike, verified: npt.ArrayLike, accepted: npt.ArrayLike, *, num_steps: int = 1
    ) -> None:
        """Record the rounds of ``num_steps`` steps, and refit now and then. The arguments are copied.

        Args:
            logits: [bs, gamma] raw logits of the confidence head.
            verified: [bs] drafts that went through the target; 0 for a round that is not the head's to predict, such as
                copied drafts.
            accepted: [bs] drafts that it kept.
        """
        num_rounds = int(np.count_nonzero(verified))
        if not num_rounds:
            return
        outcomes = np.minimum(verified, self._drawn), np.minimum(accepted, self._drawn)
        self._pending.append((np.array(logits, dtype=np.float32), *outcomes))
        self._new_rounds += num_rounds
        self._new_steps += num_steps
        is_first = self.num_refits == 0
        if self._new_rounds >= self._refit_rounds and (is_first or self._new_steps >= REFIT_STEPS):
            self._absorb()
            self._refit()

    def report(self) -> dict[str, Any]:
        """Return the JSON form.

        ``pairs``: outcomes seen by position. ``survival_ece`` and ``conditional_ece``: calibration error by position
        over the last rounds (``rounds``), of survival and of conditional acceptance as they were predicted when each
        round was observed; None where nothing was. A position counts only the rounds that verified it: that was decided
        before the outcome.
        """
        self._absorb()
        predicted, verified, accepted = self._history
        positions = np.arange(self._gamma)
        outcomes = survived(accepted, self._gamma)
        tested = reached(verified, accepted, self._gamma)
        return {
            "rounds": len(verified),
            "refits": self.num_refits,
            "pairs": self._pairs.seen.tolist(),
            "scale": self.scale.tolist(),
            "shift": self.shift.tolist(),
            "survival_ece": _ece_by_position(prefix_survival(predicted), outcomes, verified[:, None] > positions),
            "conditional_ece": _ece_by_position(predicted, outcomes, tested),
        }

    def _absorb(self) -> None:
        """Move pending rounds into window and history. The map is still the one they were predicted with."""
        if not self._pending:
            return
        logits, verified, accepted = map(np.concatenate, zip(*self._pending, strict=True))
        self._pending.clear()
        # One NaN would stay in every sum until the window has moved past it.
        usable = np.isfinite(logits).all(axis=1) & (verified > 0)
        if not usable.all():
            logits, verified, accepted = logits[usable], verified[usable], accepted[usable]
        added = sigmoid(self._map(logits)), verified, accepted
        self._history = [np.concatenate(pair)[-REPORT_ROUNDS:] for pair in zip(self._history, added, strict=True)]
        tested = reached(verified, accepted, self._gamma)
        self._pairs.append(tested, logits, survived(accepted, self._gamma))

    def _refit(self) -> None:
        self._refit_rounds = min(self._refit_rounds * (2 if self.num_refits else 1), REFIT_ROUNDS)
        self._new_rounds = self._new_steps = 0
        logits, outcomes = self._pairs.values
        self._map = self._map.refined(self._start_scale, logits, outcomes, self._pairs.filled, NEWTON_STEPS)
        self.num_refits += 1


def _ece_by_position(predicted: Floats, outcomes: Bools, mask: Bools) -> list[float | None]:
    columns = zip(predicted.T, outcomes.T, mask.T, strict=True)
    return [ece(p[used], outcome[used]) if used.any() else None for p, outcome, used in columns]
