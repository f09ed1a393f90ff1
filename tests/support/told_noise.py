"""Noise that can be told its outcomes: every random number becomes a choice, and all choices are gone through.

A random number of the served code is a uniform u, and a decision about it is where u lies among some breakpoints: the
cumulative distribution of a token, or the ratio by which a draft is kept. Here a number is known by its value and
starts as the interval [0, 1). Every decision cuts the interval at its breakpoints; one piece is taken, with its length
as weight, and another one in another run. A number that is used a second time starts from the piece that the first use
has left: that is what makes reused noise visible.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from dspark_kernels import RoundKeys
from dspark_kernels.noise import Purpose


@dataclass
class Run:
    """One run: the choices that it repeats, and those that it found.

    Attributes:
        script: pieces to take, by decision; after its end the first one is taken.
        found: pieces that each decision had.
        weight: probability of the run.
    """

    script: list[int]
    found: list[int] = field(default_factory=list)
    weight: float = 1.0
    _intervals: dict[float, tuple[float, float]] = field(default_factory=dict)

    def decide(self, number: float, breakpoints: Sequence[float]) -> int:
        """Return which piece of [0, 1), cut at ascending ``breakpoints``, the random number lies in."""
        low, high = self._intervals.get(number, (0.0, 1.0))
        edges = [low, *(point for point in breakpoints if low < point < high), high]
        pieces = [(a, b) for a, b in pairwise(edges) if b > a]
        taken = 0
        if len(pieces) > 1:
            index = len(self.found)
            taken = self.script[index] if index < len(self.script) else 0
            self.script[index:] = [taken] if index >= len(self.script) else self.script[index:]
            self.found.append(len(pieces))
        a, b = pieces[taken]
        self.weight *= (b - a) / (high - low)
        self._intervals[number] = (a, b)
        return bisect_right(list(breakpoints), (a + b) / 2)

    def next_script(self) -> list[int] | None:
        """The script of the run after this one, in depth-first order; None after the last."""
        script = self.script[: len(self.found)]
        while script and script[-1] + 1 == self.found[len(script) - 1]:
            script.pop()
        return [*script[:-1], script[-1] + 1] if script else None


class Told:
    """The run that goes on, and the random numbers that were asked for, which are the same in every run."""

    def __init__(self) -> None:
        self.run = Run([])
        self._known: dict[Any, torch.Tensor] = {}

    def remembered(self, key: Any, ask: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the numbers of ``key``, computed once."""
        if key not in self._known:
            self._known[key] = ask()
        return self._known[key]


@dataclass(frozen=True)
class ToldKeys(RoundKeys):
    """Keys of a round whose random numbers decide what the run has them decide."""

    told: Told

    def uniform(self, slots: Any, purpose: Any) -> torch.Tensor:
        key = (*self._key, *(tuple(x.tolist()) if isinstance(x, torch.Tensor) else x for x in (slots, purpose)))
        return self.told.remembered(key, lambda: RoundKeys.uniform(self, slots, purpose))

    def block_uniform(self, num_slots: int, purpose: Purpose) -> torch.Tensor:
        key = (*self._key, "block", num_slots, purpose)
        return self.told.remembered(key, lambda: RoundKeys.block_uniform(self, num_slots, purpose))

    @property
    def _key(self) -> tuple[int, ...]:
        return self.seed, int(self.step), *self.request_keys.tolist()

    def drawn(self, weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
        cumulative = weights.double().cumsum(-1)
        rows = zip(uniforms.tolist(), (cumulative / cumulative[:, -1:]).tolist(), strict=True)
        # The last breakpoint is 1: no number lies above it.
        return torch.tensor([self.told.run.decide(number, points[:-1]) for number, points in rows])

    def kept(self, draft_mass: torch.Tensor, target_mass: torch.Tensor) -> torch.Tensor:
        kept = torch.zeros(draft_mass.shape, dtype=torch.bool)
        numbers = self.block_uniform(draft_mass.shape[1], Purpose.ACCEPT).tolist()
        for row, slots in enumerate(zip(numbers, draft_mass.tolist(), target_mass.tolist(), strict=True)):
            for slot, (number, draft, target) in enumerate(zip(*slots, strict=True)):
                ratio = target / draft if draft > 0 else 1.0
                if ratio <= 0 or self.told.run.decide(number, [ratio]) > 0:
                    break  # what is after a rejected draft is not looked at
                kept[row, slot] = True
        return kept


def every_run(monkeypatch: Any, once: Callable[[Told], Any]) -> Iterator[tuple[float, Any]]:
    """``(probability, result)`` of ``once`` for every outcome of its noise, given what its keys are told by.

    Distributions are float64 then, so that what rounding leaves of a wrong one is not mistaken for a right one.
    """
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    told, script = Told(), []
    while script is not None:
        told.run = Run(script)
        result = once(told)
        yield told.run.weight, result
        script = told.run.next_script()
