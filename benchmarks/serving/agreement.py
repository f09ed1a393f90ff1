"""Do the configurations of a sweep write the same texts? At temperature 0 they have to, up to rounding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

EXCERPT = 24
"""Characters shown on each side of the place where two texts part."""


@dataclass(frozen=True)
class Answer:
    """What a configuration wrote for a prompt; the key fields tell it from every other answer of the sweep."""

    config: str
    concurrency: int
    round: int
    slot: int
    prompt_index: int
    num_tokens: int
    text: str


@dataclass(frozen=True)
class Split:
    """Two texts for one prompt that part at character ``at``, with what follows (and a bit before) in each."""

    round: int
    prompt_index: int
    at: int
    expected: str
    found: str


@dataclass(frozen=True)
class Agreement:
    """Texts of a configuration against those of another (or of itself at another concurrency), prompt by prompt."""

    config: str
    concurrency: int
    baseline: str
    baseline_concurrency: int
    compared: int
    identical: int
    splits: list[Split] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Share of identical texts, 0 to 1."""
        return self.identical / self.compared


def compare(answers: Sequence[Answer], baselines: Mapping[str, str]) -> list[Agreement]:
    """Compare every configuration with its baseline at the same concurrency.

    The baseline itself is compared with its own texts at the lowest concurrency: in 16 bits the shape of a batch alone
    moves logits, so its share is what a configuration without any error may be expected to reach.

    Args:
        answers: all answers of a sweep.
        baselines: label of the configuration to compare with, by label.
    """
    by_cell: dict[tuple[str, int], dict[tuple[int, int], Answer]] = {}
    for answer in answers:
        by_cell.setdefault((answer.config, answer.concurrency), {})[answer.round, answer.slot] = answer
    lowest = min(concurrency for _, concurrency in by_cell)
    agreements = []
    for (config, concurrency), cell in sorted(by_cell.items(), key=lambda entry: (baselines[entry[0][0]], entry[0])):
        other = (config, lowest) if baselines[config] == config else (baselines[config], concurrency)
        if other != (config, concurrency) and other in by_cell:
            agreements.append(_compare_cells(config, concurrency, cell, *other, by_cell[other]))
    return [agreement for agreement in agreements if agreement.compared]


def split_at(expected: str, found: str) -> int:
    """Number of leading characters that two texts share."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(expected, found, strict=False)))


def _compare_cells(
    config: str,
    concurrency: int,
    cell: Mapping[Any, Answer],
    baseline: str,
    baseline_concurrency: int,
    reference: Mapping[Any, Answer],
) -> Agreement:
    splits = []
    shared = sorted(cell.keys() & reference.keys())
    for key in shared:
        expected, found = reference[key].text, cell[key].text
        if expected != found or reference[key].num_tokens != cell[key].num_tokens:
            at = split_at(expected, found)
            window = slice(max(0, at - EXCERPT), at + EXCERPT)
            splits.append(Split(cell[key].round, cell[key].prompt_index, at, expected[window], found[window]))
    identical = len(shared) - len(splits)
    return Agreement(config, concurrency, baseline, baseline_concurrency, len(shared), identical, splits)
