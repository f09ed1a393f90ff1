"""Texts that the target wrote, and where the trainer gets the target's states of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_dspark.train.target import Target, TargetStates


@dataclass(frozen=True)
class CorpusRow:
    """One prompt with the target's answer."""

    input_ids: Tensor  # [S] int64
    prompt_len: int


@dataclass(frozen=True)
class StoredRow(CorpusRow):
    """A row that brings its states along. Their last row may be absent: no block reads it."""

    features: Tensor  # [S or S - 1, m * d]
    last_hidden: Tensor  # [S or S - 1, d]


StateSource = Callable[[Sequence[CorpusRow]], TargetStates]
"""The target's states of some rows, padded on the right: ``[bs, S, ...]``, on any device, in any dtype. What stands at
the last token of a row and in its padding is arbitrary."""


class ComputedStates:
    """Runs the target over the rows each time it is asked: nothing but token ids has to be kept."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def __call__(self, rows: Sequence[CorpusRow]) -> TargetStates:
        # Causal attention: padding on the right reaches no token of a row, so no mask is needed.
        return self._target.forward(padded_ids(rows).to(self._target.device))


def stored_states(rows: Sequence[CorpusRow]) -> TargetStates:
    """The states that were kept with the rows, which all have to be `StoredRow`."""
    width = max(len(row.input_ids) for row in rows)
    stored = [row for row in rows if isinstance(row, StoredRow)]
    if len(stored) < len(rows):
        raise TypeError("rows without states: use ComputedStates")

    def padded(states: Sequence[Tensor]) -> Tensor:
        batch = states[0].new_zeros(len(states), width, states[0].shape[-1])
        for padded_row, row in zip(batch, states, strict=True):
            padded_row[: len(row)] = row
        return batch

    return TargetStates(padded([row.features for row in stored]), padded([row.last_hidden for row in stored]))


def padded_ids(rows: Sequence[CorpusRow]) -> Tensor:
    """Token ids ``[bs, S]``, 0 as padding on the right."""
    ids = torch.zeros(len(rows), max(len(row.input_ids) for row in rows), dtype=torch.long)
    for padded_row, row in zip(ids, rows, strict=True):
        padded_row[: len(row.input_ids)] = row.input_ids
    return ids
