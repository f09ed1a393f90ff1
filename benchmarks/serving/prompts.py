"""Prompt files: one JSON object ``{"turns": [str, ...]}`` per line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_dspark.errors import ConfigError
from sglang_dspark.files import lines_of
from sglang_dspark.tools.prompts import first_turn


@dataclass(frozen=True)
class Prompt:
    """A user message and its line in the prompt file, counted from 0."""

    index: int
    text: str


def load_prompts(path: Path) -> list[Prompt]:
    """First turn of every conversation of a prompt file.

    Later turns are left out: they would contain the answer of the server under test, so that two servers that split
    once would go on with different workloads.

    Raises:
        ConfigError: no such file, a line that is not of the form above, or an empty file.
    """
    try:
        lines = lines_of(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--prompts {path}: {error.strerror}; pass a JSONL file of prompts") from error
    prompts = [Prompt(index, first_turn(line, f"--prompts {path}:{index + 1}")) for index, line in enumerate(lines)]
    if not prompts:
        raise ConfigError(f"--prompts {path} is empty; pass a JSONL file of prompts")
    return prompts


def load_mixed_prompts(paths: Sequence[Path]) -> list[Prompt]:
    """Prompts of several files in turn, numbered again, as many of each as the shortest file has.

    Raises:
        ConfigError: as :func:`load_prompts`.
    """
    files = [load_prompts(path) for path in paths]
    texts = [prompt.text for group in zip(*files, strict=False) for prompt in group]
    return [Prompt(index, text) for index, text in enumerate(texts)]


def round_prompts(prompts: Sequence[Prompt], round_index: int, num_prompts: int) -> list[Prompt]:
    """The prompts of one round: the same for every configuration and concurrency, others in the next round.

    Args:
        prompts: the whole set.
        round_index: 0 for the first recorded round; the warm-up round is -1 and thus takes the end of the file.
        num_prompts: prompts per round. The file is used again from its start when it is too short.
    """
    start = round_index * num_prompts
    return [prompts[(start + offset) % len(prompts)] for offset in range(num_prompts)]
