"""Do the configurations of a sweep write the same texts? At temperature 0 they have to, up to rounding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from typing import Any

from serving.load import Load

EXCERPT = 24
"""Characters shown on each side of the place where two texts part."""


@dataclass(frozen=True)
class Answer:
    """What a configuration wrote for a prompt; the key fields tell it from every other answer of the sweep."""

    config: str
    load: Load
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
    """Texts of a configuration against those of another (or of itself at another load), prompt by prompt."""

    config: str
    load: Load
    baseline: str
    baseline_load: Load
    compared: int
    identical: int
    splits: list[Split] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Share of identical texts, 0 to 1."""
        return self.identical / self.compared

    def document(self) -> dict[str, Any]:
        """Entry of ``agreement.json``."""
        loads = {"load": str(self.load), "baseline_load": str(self.baseline_load)}
        return {**asdict(self), **loads, "share": self.share}


def compare(answers: Sequence[Answer], baselines: Mapping[str, str]) -> list[Agreement]:
    """Compare every configuration with its baseline at the same load.

    The baseline itself is compared with its own texts at the first load: in 16 bits the shape of a batch alone moves
    logits, so its share is what a configuration without any error may be expected to reach.

    Args:
        answers: all answers of a sweep.
        baselines: label of the configuration to compare with, by label.
    """
    by_cell: dict[tuple[str, Load], list[Answer]] = {}
    for answer in sorted(answers, key=lambda answer: (answer.round, answer.slot)):
        by_cell.setdefault((answer.config, answer.load), []).append(answer)
    first = next(iter(answers)).load if answers else None
    agreements = []
    for (config, load), cell in sorted(by_cell.items(), key=lambda entry: (baselines[entry[0][0]], entry[0][0])):
        other = (config, first) if baselines[config] == config else (baselines[config], load)
        if other != (config, load) and other in by_cell:
            agreements.append(_compare_cells(config, load, cell, *other, by_cell[other]))
    return [agreement for agreement in agreements if agreement.compared]


def split_at(expected: str, found: str) -> int:
    """Number of leading characters that two texts share."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(expected, found, strict=False)))


def _by_prompt(cell: Sequence[Answer]) -> dict[tuple[int, int], Answer]:
    """Answers by prompt and how often it was asked before: rounds of unequal loads differ in their prompts."""
    asked: Counter[int] = Counter()
    by_prompt = {}
    for answer in cell:
        by_prompt[answer.prompt_index, asked[answer.prompt_index]] = answer
        asked[answer.prompt_index] += 1
    return by_prompt


def _compare_cells(
    config: str,
    load: Load,
    cell: Sequence[Answer],
    baseline: str,
    baseline_load: Load,
    reference: Sequence[Answer],
) -> Agreement:
    splits = []
    found_answers, expected_answers = _by_prompt(cell), _by_prompt(reference)
    shared = sorted(found_answers.keys() & expected_answers.keys())
    for key in shared:
        expected, found = expected_answers[key], found_answers[key]
        if expected.text != found.text or expected.num_tokens != found.num_tokens:
            at = split_at(expected.text, found.text)
            window = slice(max(0, at - EXCERPT), at + EXCERPT)
            splits.append(Split(found.round, found.prompt_index, at, expected.text[window], found.text[window]))
    return Agreement(config, load, baseline, baseline_load, len(shared), len(shared) - len(splits), splits)
