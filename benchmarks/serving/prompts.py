"""The prompts of a sweep, and which of them a round asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_dspark.tools.prompts import read_prompts


@dataclass(frozen=True)
class Prompt:
    """A user message.

    Attributes:
        index: its place among the prompts, counted from 0.
    """

    index: int
    text: str


def load_mixed_prompts(paths: Sequence[Path]) -> list[Prompt]:
    """Read the prompts of several files in turn, as many of each as the shortest file has.

    Only first turns are asked. Later ones would contain the answer of the server under test, so that two servers that
    split once would go on with different workloads.

    Raises:
        ConfigError: as :func:`sglang_dspark.tools.prompts.read_prompts`.
    """
    files = [read_prompts(path) for path in paths]
    texts = [text for group in zip(*files, strict=False) for text in group]
    return [Prompt(index, text) for index, text in enumerate(texts)]


def round_prompts(prompts: Sequence[Prompt], round_index: int, num_prompts: int) -> list[Prompt]:
    """Return the prompts of one round: the same for every configuration and load, others in the next round.

    Args:
        prompts: the whole set.
        round_index: 0 for the first recorded round; the warm-up round is -1 and thus takes the end of the set.
        num_prompts: prompts per round. The set is used again from its start when it is too short.
    """
    start = round_index * num_prompts
    return [prompts[(start + offset) % len(prompts)] for offset in range(num_prompts)]
