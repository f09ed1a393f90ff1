"""Who writes the texts: the target in this process, or a server (`sglang_dspark.tools.train.server_writer`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from sglang_dspark.tools.train.decoding import decode
from sglang_dspark.tools.train.lane_decoding import LaneDecoder, affordable_lanes, lane_capacity, reason_against_lanes
from sglang_dspark.tools.train.rows import CorpusRow
from sglang_dspark.tools.train.target import Target

logger = logging.getLogger(__name__)


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
    """The target in this process.

    On a GPU it decodes in lanes (`sglang_dspark.tools.train.lane_decoding`), where the target allows that.

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
        self._decoder: LaneDecoder | None = None
        self._most_prompts = 0  # that the decoder was made for
        self._in_lanes = target.device.type == "cuda" and not keep_states
        reason = reason_against_lanes(target)
        if self._in_lanes and reason is not None:
            logger.warning("the target writes step by step, which is slow on a GPU: %s", reason)
            self._in_lanes = False

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
        if not self._in_lanes:
            return decode(
                self._target,
                prompts,
                temperatures,
                max_new_tokens,
                generator,
                keep_states=self._keep_states,
                on_progress=self._on_progress,
            )
        decoder = self._decoder_for(prompts, max_new_tokens)
        return decoder.decode(prompts, temperatures, max_new_tokens, generator, self._on_progress)

    def _decoder_for(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> LaneDecoder:
        """The decoder of the last call where it fits; every other one has to be captured anew."""
        capacity = lane_capacity(prompts, max_new_tokens)
        # Capacity that no text needs is read in every step all the same.
        fits = self._decoder is not None and capacity <= self._decoder.capacity <= 2 * capacity
        if not fits or len(prompts) > self._most_prompts:
            self._decoder = None  # its memory has to be free before the next one is measured
            torch.cuda.empty_cache()
            free, _ = torch.cuda.mem_get_info(self._target.device)
            lanes = min(len(prompts), affordable_lanes(self._target, capacity, free))
            self._decoder, self._most_prompts = LaneDecoder(self._target, lanes, capacity), len(prompts)
        assert self._decoder is not None
        return self._decoder
