"""Training text that the target writes itself, stored together with the target's states.

A corpus is a directory of shards ``shard-00000.safetensors``, one per decoded batch, so that an interrupted generation
loses one batch and training can start on what is there. Tensors of a shard, for R rows of N tokens in total:

- ``input_ids`` ``[N]`` int32: prompt and answer of all rows, back to back
- ``row_lens`` ``[R]`` and ``prompt_lens`` ``[R]`` int32: tokens per row, and how many of them are prompt
- ``features`` ``[N, m * d]`` and ``last_hidden`` ``[N, d]``: the target's states; the last token of a row never went
  through the target and has zeros
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sglang_dspark.errors import ConfigError
from sglang_dspark.train.decoding import Continuation, decode
from sglang_dspark.train.target import Target

_T = TypeVar("_T")


@dataclass(frozen=True)
class CorpusRow:
    """One prompt with the target's answer and its states."""

    input_ids: Tensor  # [S] int64
    prompt_len: int
    features: Tensor  # [S, m * d]; the last row may be absent, no block reads it
    last_hidden: Tensor  # [S, d]; likewise


class Corpus:
    """The rows of all shards of a directory, states in memory in the dtype they were stored in."""

    def __init__(self, rows: Sequence[CorpusRow]) -> None:
        self.rows = list(rows)

    @classmethod
    def load(cls, directory: str | Path, *, first: int = 0, limit: int | None = None) -> Corpus:
        """Load shards `first` to `first + limit` (all by default).

        Raises:
            ConfigError: there is no such shard.
        """
        paths = sorted(Path(directory).glob("shard-*.safetensors"))
        paths = paths[first : None if limit is None else first + limit]
        if not paths:
            raise ConfigError(
                f"corpus={str(directory)!r} holds no shard from number {first} on; generate a corpus first"
            )
        return cls([row for path in paths for row in _read_shard(path)])

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def num_answer_tokens(self) -> int:
        return sum(len(row.input_ids) - row.prompt_len for row in self.rows)


def padded_features(rows: Sequence[CorpusRow]) -> Tensor:
    """Features of `rows`, padded on the right with zeros: ``[bs, S, m * d]``."""
    width = max(len(row.input_ids) for row in rows)
    features = rows[0].features.new_zeros(len(rows), width, rows[0].features.shape[-1])
    for padded, row in zip(features, rows, strict=True):
        padded[: len(row.features)] = row.features
    return features


def read_prompts(path: str | Path, limit: int | None = None) -> list[str]:
    """First user turns of a JSONL file whose lines are ``{"turns": [str, ...]}`` or ``{"prompt": str}``.

    Raises:
        ConfigError: a line has neither key.
    """
    prompts: list[str] = []
    with Path(path).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if limit is not None and len(prompts) >= limit:
                break
            row = json.loads(line)
            if "turns" in row:
                prompts.append(row["turns"][0])
            elif "prompt" in row:
                prompts.append(row["prompt"])
            else:
                raise ConfigError(f'{path}:{number} has the keys {sorted(row)}; each line needs "turns" or "prompt"')
    return prompts


def invent_prompts(
    target: Target,
    openings: Sequence[str],
    *,
    max_new_tokens: int,
    temperature: float,
    batch_size: int,
    generator: torch.Generator,
) -> list[str]:
    """User turns that the target writes itself when its chat template is opened at the user turn.

    Each opening is the text that the turn starts with. Turns that did not end within `max_new_tokens` are dropped.
    """
    head = _user_turn_head(target)
    prompts = []
    for chunk in _chunks(openings, batch_size):
        ids = [target.tokenizer(head + opening, add_special_tokens=False)["input_ids"] for opening in chunk]
        for row, opening in zip(
            decode(target, ids, [temperature] * len(ids), max_new_tokens, generator), chunk, strict=True
        ):
            *turn, last = row.output_ids
            if last in target.stop_ids:
                prompts.append((opening + target.tokenizer.decode(turn)).strip())
    return [prompt for prompt in prompts if prompt]


def generate(
    target: Target,
    prompts: Sequence[str],
    temperatures: Sequence[float],
    directory: str | Path,
    *,
    max_prompt_len: int,
    max_new_tokens: int,
    batch_size: int,
    seed: int,
    max_shards: int | None = None,
    on_shard: Callable[[int, int], None] | None = None,
) -> None:
    """Write the target's answers to `prompts` as shards in `directory`; continues after the shards already there.

    Args:
        temperatures: one per prompt, 0 = greedy.
        max_prompt_len: longer prompts (in tokens, chat template included) are left out.
        batch_size: rows decoded together, and rows per shard.
        max_shards: stop after this many; None writes all.
        on_shard: called with (shards written, shards in total) after each shard.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    encoded = [(target.chat_prompt(prompt), heat) for prompt, heat in zip(prompts, temperatures, strict=True)]
    batches = list(_chunks([row for row in encoded if len(row[0]) <= max_prompt_len], batch_size))[:max_shards]
    for number, batch in enumerate(batches):
        path = directory / f"shard-{number:05d}.safetensors"
        if not path.exists():
            generator = torch.Generator().manual_seed(seed + number)
            ids, heats = zip(*batch, strict=True)
            _write_shard(path, decode(target, ids, heats, max_new_tokens, generator))
        if on_shard is not None:
            on_shard(number + 1, len(batches))


def _user_turn_head(target: Target) -> str:
    marker = "\x00"
    text = target.tokenizer.apply_chat_template([{"role": "user", "content": marker}], tokenize=False)
    return text[: text.index(marker)]


def _chunks(items: Sequence[_T], size: int) -> Iterator[Sequence[_T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _write_shard(path: Path, rows: Sequence[Continuation]) -> None:
    def padded(states: Tensor) -> Tensor:
        return torch.cat([states, states.new_zeros(1, states.shape[-1])])

    tokens = [row.prompt_ids + row.output_ids for row in rows]
    tensors = {
        "input_ids": torch.tensor([token for row in tokens for token in row], dtype=torch.int32),
        "row_lens": torch.tensor([len(row) for row in tokens], dtype=torch.int32),
        "prompt_lens": torch.tensor([len(row.prompt_ids) for row in rows], dtype=torch.int32),
        "features": torch.cat([padded(row.features) for row in rows]),
        "last_hidden": torch.cat([padded(row.last_hidden) for row in rows]),
    }
    partial = path.with_suffix(".partial")
    save_file(tensors, partial)
    partial.rename(path)


def _read_shard(path: Path) -> list[CorpusRow]:
    shard = load_file(path)
    lens = shard["row_lens"].tolist()
    pieces = zip(
        shard["input_ids"].long().split(lens),
        shard["prompt_lens"].tolist(),
        shard["features"].split(lens),
        shard["last_hidden"].split(lens),
        strict=True,
    )
    return [CorpusRow(*piece) for piece in pieces]
