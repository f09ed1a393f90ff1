"""Prompt files: one JSON object ``{"turns": [str, ...]}`` or ``{"prompt": str}`` per line."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from sglang_dspark.errors import ConfigError
from sglang_dspark.files import lines_of


def read_prompts(path: Path, limit: int | None = None, shuffle_seed: int | None = None) -> list[str]:
    """Read first user turns in the order of the file, each text once: a repeated one would be measured twice.

    Args:
        limit: how many to read at most.
        shuffle_seed: where the file has more than `limit` lines, choose among them as DeepSpec's evaluator does: its
            lines are shuffled with this seed, and the first ones stay.

    Raises:
        ConfigError: the file cannot be read, a line is not of the form above, or there is no line.
    """
    try:
        lines = lines_of(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {path}: {error}; pass a JSONL file of prompts") from error
    texts = [
        first_turn(line, f"--prompts {path}:{number}") for number, line in enumerate(lines, start=1) if line.strip()
    ]
    if shuffle_seed is not None and limit is not None and len(texts) > limit:
        random.Random(shuffle_seed).shuffle(texts)
        texts = texts[:limit]
    prompts = list(dict.fromkeys(texts))[:limit]
    if not prompts:
        raise ConfigError(f"--prompts {path} is empty; pass a JSONL file of prompts")
    return prompts


def first_turn(line: str, where: str) -> str:
    """Return the first user turn of one line of a prompt file.

    Args:
        where: the line stands, for the message.

    Raises:
        ConfigError: the line is not of the form above.
    """
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {line[:60]!r}; write one object per line") from error
    text = None
    if isinstance(row, dict):
        turns = row.get("turns", [row.get("prompt")])
        text = turns[0] if isinstance(turns, list) and turns else None
    if not isinstance(text, str):
        raise ConfigError(f'{where}: {line[:60]!r} has no text; write {{"turns": [text, ...]}} or {{"prompt": text}}')
    return text
