"""Draw simulated blocks: the confidences of their drafts, and how many are accepted."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from sglang_dspark.errors import ConfigError
from sglang_dspark.files import lines_of

FORMAT_VERSION = 1
_FORMAT = "sglang-dspark blocks"
# Probabilities of 0 and 1 have no logit.
_EDGE = 1e-4
_BLOCKS_AHEAD = 64  # to draw one at a time takes as long as to simulate the step

Ints = NDArray[np.int64]


class BlockSource(Protocol):
    """Draws blocks.

    Attributes:
        gamma: drafts per block.
        name: for tables and figures.
    """

    @property
    def gamma(self) -> int: ...

    @property
    def name(self) -> str: ...

    def draw(self, requests: Sequence[int], rng: np.random.Generator) -> tuple[NDArray[np.float64] | None, Ints]:
        """Draw a block for each of ``requests``.

        Returns:
            ``(logits [n, gamma] of the confidence head, accepted [n])``: drafts that the target would accept if it
            verified all of them. None for the logits of a drafter without a confidence head.
        """


@dataclass(frozen=True)
class ConditionalAcceptance:
    """Blocks by a conditional acceptance per position.

    The acceptance of every single draft varies around its position's mean (a beta distribution), and the confidence
    head knows it exactly.

    Attributes:
        conditional: [gamma] mean probability that a draft is accepted, given that all before it are.
        concentration: the sum of the beta distribution's parameters; the larger, the more alike the drafts are. 4 is as
            wide as what confidence heads report on mixed text; infinity makes all drafts of a position alike.
    """

    conditional: tuple[float, ...]
    concentration: float = 4.0
    name: str = "conditional acceptance"

    def __post_init__(self) -> None:
        if not self.conditional or not all(0 <= rate <= 1 for rate in self.conditional):
            raise ConfigError(
                f"conditional acceptance {list(self.conditional)} must be probabilities, one per draft, e.g. 0.9,0.8"
            )

    @property
    def gamma(self) -> int:
        return len(self.conditional)

    def draw(self, requests: Sequence[int], rng: np.random.Generator) -> tuple[NDArray[np.float64] | None, Ints]:
        means = np.clip(self.conditional, _EDGE, 1 - _EDGE)
        if np.isinf(self.concentration):
            rates = np.tile(means, (len(requests), 1))
        else:
            shape = (len(requests), self.gamma)
            rates = rng.beta(self.concentration * means, self.concentration * (1 - means), size=shape)
            rates = np.clip(rates, _EDGE, 1 - _EDGE)
        accepted = (rng.random(rates.shape) < rates).cumprod(1).sum(1)
        return np.log(rates / (1 - rates)), accepted


class OwnBlocks:
    """Blocks of a source, of which every request has its own series: the n-th one is the same under every policy.

    Drawn from one series for all, the luck of other drafts makes policies that decide alike differ by some percent.

    Args:
        source: where they come from.
        seed: of the series.
    """

    def __init__(self, source: BlockSource, seed: int = 0) -> None:
        self.gamma, self.name = source.gamma, source.name
        self._source, self._seed = source, seed
        self._ahead: dict[int, Iterator[tuple[NDArray[np.float64] | None, Any]]] = {}

    def draw(self, requests: Sequence[int], rng: np.random.Generator) -> tuple[NDArray[np.float64] | None, Ints]:
        """Take the next block of each of ``requests``, whatever ``rng`` says; see :class:`BlockSource`."""
        blocks = [next(self._ahead.setdefault(request, self._series(request))) for request in requests]
        logits, accepted = zip(*blocks, strict=True)
        return None if logits[0] is None else np.stack(logits), np.array(accepted, dtype=np.int64)

    def _series(self, request: int) -> Iterator[tuple[NDArray[np.float64] | None, Any]]:
        rng = np.random.default_rng((self._seed, request))
        while True:
            logits, accepted = self._source.draw([request] * _BLOCKS_AHEAD, rng)
            yield from zip(repeat(None) if logits is None else logits, accepted)  # noqa: B905 - of which one is endless


@dataclass(frozen=True)
class RecordedBlocks:
    """Blocks that a server really drafted and verified whole, see ``python -m sglang_dspark evaluate --blocks``.

    A request takes the blocks of one recorded answer, at random and again and again, so that easy and hard texts stay
    apart. Which blocks follow each other is lost.

    Attributes:
        accepted: [n] drafts accepted, 0 to gamma.
        logits: [n, gamma] raw logits of the confidence head; None for a drafter without one.
        answer: [n] index of the answer that each block belongs to.
    """

    gamma: int
    accepted: Ints
    logits: NDArray[np.float64] | None
    answer: Ints
    name: str = "recorded blocks"
    _by_answer: list[Ints] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        rows = [np.flatnonzero(self.answer == answer) for answer in np.unique(self.answer)]
        object.__setattr__(self, "_by_answer", rows)

    def draw(self, requests: Sequence[int], rng: np.random.Generator) -> tuple[NDArray[np.float64] | None, Ints]:
        rows = [self._by_answer[request % len(self._by_answer)] for request in requests]
        chosen = np.array([row[int(rng.integers(len(row)))] for row in rows], dtype=np.int64)
        return None if self.logits is None else self.logits[chosen], self.accepted[chosen]

    def save(self, path: Path) -> None:
        """Write the blocks as JSON, one line per answer."""
        lines = []
        for rows in self._by_answer:
            answer: dict[str, Any] = {"accepted": self.accepted[rows].tolist()}
            if self.logits is not None:
                answer["logits"] = self.logits[rows].round(3).tolist()
            lines.append(json.dumps(answer))
        head = {"format": _FORMAT, "version": FORMAT_VERSION, "gamma": self.gamma, "name": self.name}
        path.write_text("\n".join([json.dumps(head), *lines]) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file of :meth:`save`.

        Raises:
            ConfigError: it is none.
        """
        try:
            return cls._parse(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(
                f"--blocks {path}: {error!r}; give a file of python -m sglang_dspark evaluate --blocks"
            ) from error

    @classmethod
    def _parse(cls, text: str) -> Self:
        head, *answers = (json.loads(line) for line in lines_of(text))
        if (head["format"], head["version"]) != (_FORMAT, FORMAT_VERSION):
            raise ValueError(f"format {head['format']!r}, version {head['version']!r}")
        gamma, accepted = int(head["gamma"]), [count for answer in answers for count in answer["accepted"]]
        logits = [row for answer in answers for row in answer.get("logits", ())]
        sizes_fit = not logits or [len(row) for row in logits] == [gamma] * len(accepted)
        if not accepted or not 0 <= min(accepted) <= max(accepted) <= gamma or not sizes_fit:
            raise ValueError(f"no blocks of {gamma} drafts")
        return cls(
            gamma,
            np.array(accepted, dtype=np.int64),
            np.array(logits, dtype=np.float64) if logits else None,
            np.repeat(np.arange(len(answers)), [len(answer["accepted"]) for answer in answers]),
            str(head["name"]),
        )
