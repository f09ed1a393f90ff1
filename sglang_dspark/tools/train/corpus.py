"""Training text that the target writes itself, on disk.

A corpus is a directory of shards ``shard-00000.safetensors``, one per written batch, so that an interrupted generation
loses one batch and training can start on what is there. Tensors of a shard, for R rows of N tokens in total:

- ``input_ids`` ``[N]`` int32: prompt and answer of all rows, back to back
- ``row_lens`` ``[R]`` and ``prompt_lens`` ``[R]`` int32: tokens per row, and how many of them are prompt
- ``features`` ``[N, m * d]`` and ``last_hidden`` ``[N, d]``, where states are kept: the target's states; the last token
  of a row never went through the target and has zeros
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sglang_dspark.errors import ConfigError
from sglang_dspark.files import written_whole
from sglang_dspark.tools.train.prompt_format import PromptFormat
from sglang_dspark.tools.train.rows import CorpusRow, StoredRow
from sglang_dspark.tools.train.text_writer import TextWriter

_T = TypeVar("_T")


class Corpus:
    """The rows of all shards of a directory; states, where kept, in memory in the dtype they were stored in."""

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


def invent_prompts(
    writer: TextWriter,
    prompt_format: PromptFormat,
    openings: Sequence[str],
    *,
    max_new_tokens: int,
    temperature: float,
    batch_size: int,
    generator: torch.Generator,
) -> list[str]:
    """User turns that the target writes itself when its chat template is opened at the user turn.

    Each opening is the text that the turn starts with, or empty. Turns that did not end within `max_new_tokens` are
    dropped.
    """
    prompts = []
    for chunk in _chunks(openings, batch_size):
        ids = [prompt_format.open_user_turn(opening) for opening in chunk]
        rows = writer.write(ids, [temperature] * len(ids), max_new_tokens, generator)
        for row, opening in zip(rows, chunk, strict=True):
            turn = prompt_format.invented_turn(row.input_ids[row.prompt_len :].tolist(), writer.stop_ids)
            if turn is not None:
                prompts.append((opening + turn).strip())
    return [prompt for prompt in prompts if prompt]


def generate(  # noqa: PLR0913 - each is an option of the command
    writer: TextWriter,
    prompts: Sequence[Sequence[int]],
    temperatures: Sequence[float],
    directory: str | Path,
    *,
    max_new_tokens: int,
    batch_size: int,
    seed: int,
    max_shards: int | None = None,
    seconds: float | None = None,
    on_shard: Callable[[int, int], None] | None = None,
) -> None:
    """Write the target's answers to `prompts` as shards in `directory`; continues after the shards already there.

    Args:
        prompts: token ids, the prompts of one batch next to each other.
        temperatures: one per prompt, 0 = greedy.
        batch_size: rows written together, and rows per shard.
        max_shards: stop after this many; None writes all.
        seconds: stop before the shard that would take longer than this, judged by the slowest before it.
        on_shard: called with (shards written, shards in total) after each shard.
    """
    directory = Path(directory)
    batches = list(_chunks(list(zip(prompts, temperatures, strict=True)), batch_size))[:max_shards]
    started, slowest = time.perf_counter(), 0.0
    for number, batch in enumerate(batches):
        path = directory / f"shard-{number:05d}.safetensors"
        if not path.exists():
            begun = time.perf_counter()
            if seconds is not None and begun - started + slowest > seconds:
                break
            generator = torch.Generator().manual_seed(seed + number)
            ids, heats = zip(*batch, strict=True)
            _write_shard(path, writer.write(ids, heats, max_new_tokens, generator))
            slowest = max(slowest, time.perf_counter() - begun)
        if on_shard is not None:
            on_shard(number + 1, len(batches))


def _chunks(items: Sequence[_T], size: int) -> Iterator[Sequence[_T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _write_shard(path: Path, rows: Sequence[CorpusRow]) -> None:
    tensors = {
        "input_ids": torch.cat([row.input_ids for row in rows]).int(),
        "row_lens": torch.tensor([len(row.input_ids) for row in rows], dtype=torch.int32),
        "prompt_lens": torch.tensor([row.prompt_len for row in rows], dtype=torch.int32),
    }
    stored = [row for row in rows if isinstance(row, StoredRow)]
    if stored:
        tensors["features"] = torch.cat([_padded(row.features, row) for row in stored])
        tensors["last_hidden"] = torch.cat([_padded(row.last_hidden, row) for row in stored])
    with written_whole(path) as partial:
        save_file(tensors, partial)


def _padded(states: Tensor, row: CorpusRow) -> Tensor:
    return torch.cat([states, states.new_zeros(len(row.input_ids) - len(states), states.shape[-1])])


def _read_shard(path: Path) -> list[CorpusRow]:
    shard = load_file(path)
    lens = shard["row_lens"].tolist()
    texts = list(zip(shard["input_ids"].long().split(lens), shard["prompt_lens"].tolist(), strict=True))
    if "features" not in shard:
        return [CorpusRow(*text) for text in texts]
    states = zip(shard["features"].split(lens), shard["last_hidden"].split(lens), strict=True)
    return [StoredRow(*text, *state) for text, state in zip(texts, states, strict=True)]
