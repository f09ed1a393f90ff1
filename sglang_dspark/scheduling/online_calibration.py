"""Calibration that follows the running server: predicted survivals against what verification observed, by position.

Copied candidates are weighed according to what verification has shown of others that matched as well. Whether a drafter
fits its target is judged from its first drafts, next to what its own confidence promises, and chance.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import sqrt
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from dspark_kernels import KIND_ROWS, NUM_ROWS
from numpy.typing import NDArray

from sglang_dspark.scheduling.sts import (
    Bools,
    Floats,
    Ints,
    LogisticMap,
    StsCalibration,
    ece,
    prefix_survival,
    reached,
    sigmoid,
    survived,
)

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
        values: two [gamma, capacity] float64 arrays, one per field, in no particular order along a row.
        filled: [gamma] how many of the first entries of a row hold values; the others are 0.
        seen: [gamma] values ever appended.
    """

    def __init__(self, gamma: int, capacity: int) -> None:
        self.values = np.zeros((2, gamma, capacity))
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
        self._pairs = PositionWindow(gamma, WINDOW_PAIRS)
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
            self._refit_rounds = min(self._refit_rounds * (1 if is_first else 2), REFIT_ROUNDS)
            self._new_rounds = self._new_steps = 0
            seen, kept = self._pairs.values
            self._map = self._map.refined(self._start_scale, seen, kept, self._pairs.filled, NEWTON_STEPS)
            self.num_refits += 1

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


def _ece_by_position(predicted: Floats, outcomes: Bools, mask: Bools) -> list[float | None]:
    columns = zip(predicted.T, outcomes.T, mask.T, strict=True)
    return [ece(p[used], outcome[used]) if used.any() else None for p, outcome, used in columns]


FIT_FEWEST = 64
"""First drafts before anything is said."""
FIT_MOST = 4096
"""First drafts after which the verdict stays."""
FIT_CHANCE = 0.05
"""Acceptance of first drafts that a guess without a look at the text comes near: the target's commonest token."""
FIT_WITHOUT_HEAD = 0.12
"""The same below which a drafter that promises nothing is named: 0.1 is what wrong taps reach."""
FIT_PROMISE = 1 / 3
"""Share of what a drafter's confidence promises below which it is named."""
_Z = 3.0
"""Standard deviations of the interval, which is looked at often."""


class FitVerdict(StrEnum):
    """Name what is known of the fit of a drafter."""

    UNKNOWN = "unknown"
    FITS = "fits"
    MISFIT = "misfit"


@dataclass(frozen=True)
class DrafterFit:
    """Hold what is known of a drafter's first drafts, those at position 0 of a block.

    Attributes:
        first_drafts: verified.
        accepted: of them.
        promised: mean probability that the drafter's raw confidence, of its head or its selector, gave to first drafts;
            None without one.
    """

    first_drafts: int = 0
    accepted: int = 0
    promised: float | None = None

    @property
    def share(self) -> float | None:
        """Return the accepted share; None before the first draft."""
        return self.accepted / self.first_drafts if self.first_drafts else None

    @property
    def most(self) -> float:
        """Return the upper end of the acceptance's interval (Wilson, 1927), 1 before the first draft."""
        n, z2 = self.first_drafts, _Z * _Z
        if n == 0:
            return 1.0
        share = self.accepted / n
        return (share + z2 / (2 * n) + _Z * sqrt(share * (1 - share) / n + z2 / (4 * n * n))) / (1 + z2 / n)

    @property
    def verdict(self) -> FitVerdict:
        """Return whether the drafter fits.

        A head that promises little on hard texts is believed, unless chance would do as well.
        """
        if self.first_drafts < FIT_FEWEST:
            return FitVerdict.UNKNOWN
        least = FIT_WITHOUT_HEAD if self.promised is None else max(FIT_CHANCE, FIT_PROMISE * self.promised)
        return FitVerdict.MISFIT if self.most < least else FitVerdict.FITS

    @property
    def sentence(self) -> str:
        """Return the finding in words."""
        if self.share is None:
            return "no first draft has been verified yet"
        promise = "" if self.promised is None else f"; its own confidence promised {self.promised:.0%}"
        return f"{self.share:.1%} of {self.first_drafts} first drafts were accepted{promise}"

    @property
    def warning(self) -> str | None:
        """Return the warning about a drafter that does not fit; None if it fits."""
        if self.verdict is not FitVerdict.MISFIT:
            return None
        return (
            f"the drafter hardly predicts this target: {self.sentence}. Usual causes: it was made for another target "
            "or chat template, its taps are wrong, or its weights are misread (docs/operating.md, section A drafter "
            "that does not fit, says how each looks). Texts stay exact, but decoding is slower than without speculation"
        )

    def report(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {
            "verdict": str(self.verdict),
            "first_drafts": self.first_drafts,
            "accepted": self.share,
            "promised": self.promised,
            "warning": self.warning,
        }


class PredictedSurvival:
    """Sums over verified drafts whose survival was predicted before the outcome was known.

    A draft that was not verified says nothing, and whether it was verified was decided before its outcome: what is
    summed is fair to the predictions.
    """

    def __init__(self, gamma: int) -> None:
        self._positions = np.arange(gamma)
        self._sums = np.zeros((3, gamma))

    def observe(self, survival: NDArray[np.float64], verified: NDArray[np.int64], accepted: NDArray[np.int64]) -> None:
        """Add rounds: [n, gamma] predictions, read up to the [n] verified drafts, and [n] accepted ones."""
        seen = verified[:, None] > self._positions
        # A replaced array, not a changed one: a thread may be reading the sums.
        self._sums = self._sums + np.stack(
            [
                seen.sum(0),
                np.where(seen, survival, 0.0).sum(0),
                (accepted[:, None] > self._positions).sum(0),
            ]
        )

    def sums(self) -> NDArray[np.float64]:
        """Return [3, gamma] number of drafts, sum of the predictions, drafts that survived; never written to again."""
        return self._sums


CHAIN_WINDOW = 512
"""Candidates that a rate averages over, for each number of matched tokens."""
CHAIN_WORTHY_RATE = 0.6
"""Share of right candidates from which they are drafted: about that of a drafter's tokens whose predecessors are kept.
On texts of the bundled pair, 0.5 and 0.6 were alike, and 0.7 brought 2 % less."""
CHAIN_BOOST = 64.0
"""Nats: the drafter's own token is hardly ever drawn next to the candidate. Boosts that grow with the rate brought
less: a drafter is often sure where it is wrong."""
_SEEN, _RIGHT = 2.5, np.array([[0.25], [0.25], [2.0]])
"""Candidates, and right ones of each kind of chain, before any was seen: those that compete weigh nothing at the start,
and those that were asked for are what their request says they are."""


class ChainWeights:
    """Count how often candidates of chains are the target's tokens, by the tokens that match before them.

    A candidate in place j of a chain of n matched tokens stands after n + j that match, if those before it in the
    chain were right: so chains of all lengths teach each other. Those of one kind do: in thousands of tokens of earlier
    answers short matches mean less, and without them requests draft as if there were none.

    Args:
        most: matched tokens that are told apart.
    """

    def __init__(self, most: int) -> None:
        self._counts = np.zeros((2, len(_RIGHT), most + 1))  # right, and all; by kind
        self._places = np.arange(most + 1)

    def observe(self, rows: Ints, right: Ints, seen: Ints) -> None:
        """Add rounds.

        Whether a place is seen depends only on the places before it, and the token there is drawn from the target's
        distribution, whatever was drafted: the sample is fair.

        Args:
            rows: [n] rows of the weights that the round's chain had, 0 without a chain.
            right: [n] leading committed tokens of the round that are the chain's.
            seen: [n] committed tokens of the round that have a place in the chain.
        """
        counts = np.zeros_like(self._counts)
        kinds, matched = np.divmod(rows, KIND_ROWS)
        has_chain, lengths = matched > 0, len(self._places)
        num_cells = counts[0].size
        for place in range(int(seen.max(initial=0))):
            tested = has_chain & (place < seen) & (place <= right)
            cells = kinds[tested] * lengths + np.minimum(matched[tested] + place, lengths - 1)
            outcomes = [np.bincount(cells, weights, num_cells) for weights in (right[tested] > place, None)]
            counts += np.reshape(outcomes, counts.shape)
        self._counts = self._counts * np.exp(-counts[1] / CHAIN_WINDOW) + counts

    def rates(self) -> Floats:
        """Return [kinds, most + 1] how likely a candidate is right after so many matched tokens, by kind."""
        right, seen = self._counts
        return (right + _RIGHT) / (seen + _SEEN)

    def table(self, scale: Floats, shift: Floats) -> Floats:
        """Return [2, NUM_ROWS, slots] boosts, and the confidence logits that a slot has at least.

        Args:
            scale, shift: [slots] of the calibration, which confidence logits go through.
        """
        rates = self.rates()[:, np.arange(KIND_ROWS)[:, None] + np.arange(len(scale))]
        boosts = np.where(rates > CHAIN_WORTHY_RATE, CHAIN_BOOST, 0.0)
        boosts[-1] = CHAIN_BOOST
        boosts[:, 0] = 0.0
        least = np.where(boosts > 0, (np.log(rates / (1 - rates)) - shift) / scale, -np.inf)
        return np.stack([boosts, least]).reshape(2, NUM_ROWS, len(scale))
