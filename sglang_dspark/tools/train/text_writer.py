"""Who writes the texts: the target in this process, or a server (`sglang_dspark.tools.train.server_writer`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from sglang_dspark.tools.train.decoding import decode
from sglang_dspark.tools.train.rows import CorpusRow
from sglang_dspark.tools.train.target import Target


class TextWriter(Protocol):
    """Lets the target continue prompts."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Token ids that end an answer."""

    def write(
        self,
        prompts: Sequence[Sequence[int]],
        temperatures: Sequence[float],
        max_new_tokens: int,
        generator: torch.Generator,
    ) -> list[CorpusRow]:
        """Continue every prompt until a stop token, which is kept, or `max_new_tokens`.

        Args:
            prompts: token ids.
            temperatures: one per prompt, 0 = greedy; the whole vocabulary is drawn from.
            generator: CPU generator behind all draws.
        """


class InProcessWriter:
    """The target in this process, step by step: for small targets on a CPU, and where its states are to be kept.

    Args:
        keep_states: keep the target's states with the rows (`StoredRow`).
        on_progress: called while texts are written, with how many were since the last call; parts of texts count.
    """

    def __init__(
        self,
        target: Target,
        *,
        keep_states: bool = False,
        on_progress: Callable[[float], None] = lambda num_texts: None,
    ) -> None:
        self._target = target
        self._keep_states = keep_states
        self._on_progress = on_progress

    @property
    def stop_ids(self) -> frozenset[int]:
        """See `TextWriter.stop_ids`."""
        return self._target.stop_ids

    def write(
        self,
        prompts: Sequence[Sequence[int]],
        temperatures: Sequence[float],
        max_new_tokens: int,
        generator: torch.Generator,
    ) -> list[CorpusRow]:
        """See `TextWriter.write`."""
        return decode(
            self._target,
            prompts,
            temperatures,
            max_new_tokens,
            generator,
            keep_states=self._keep_states,
            on_progress=self._on_progress,
        )
