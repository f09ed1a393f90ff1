"""Texts that the target wrote, and where the trainer gets the target's states of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from dspark_kernels import to_device
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dspark_training.target import Target, TargetStates


@dataclass(frozen=True)
class Text:
    """One prompt with the target's answer."""

    input_ids: Tensor  # [S] int64
    prompt_len: int


@dataclass(frozen=True)
class StoredText(Text):
    """A text that brings its states along, without those of its last token: no block reads them."""

    features: Tensor  # [S - 1, m * d]
    last_hidden: Tensor  # [S - 1, d]


StatesOf = Callable[[Sequence[Text]], TargetStates]
"""Gives the target's states of some texts, padded on the right: ``[bs, S, ...]``, on any device, in any dtype. What
stands at the last token of a text and in its padding is arbitrary."""


class ComputedStates:
    """Runs the target over the rows each time it is asked: nothing but token ids has to be kept."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def __call__(self, rows: Sequence[Text]) -> TargetStates:
        return self._target.forward(to_device(padded_ids(rows), self._target.device))


def stored_states(rows: Sequence[Text]) -> TargetStates:
    """The states that were kept with the rows, which all have to be `StoredText`."""
    width = max(len(row.input_ids) for row in rows)
    stored = [row for row in rows if isinstance(row, StoredText)]
    if len(stored) < len(rows):
        raise TypeError("rows without states: use ComputedStates")

    def padded(states: list[Tensor]) -> Tensor:
        # The states of a row may end one token early, so the longest row alone does not give the width.
        batch = pad_sequence(states, batch_first=True)
        return F.pad(batch, (0, 0, 0, width - batch.shape[1]))

    return TargetStates(padded([row.features for row in stored]), padded([row.last_hidden for row in stored]))


def keep_states(target: Target, rows: Sequence[Text], *, batch_tokens: int) -> list[Text]:
    """`rows` with the target's states, which stay on its device: a step of training then never runs the target.

    Args:
        batch_tokens: tokens that go through the target together, padding included.
    """
    lens = [len(row.input_ids) - 1 for row in rows]
    starts = list(accumulate(lens, initial=0))
    width = len(target.tap_ids) * target.hidden_size
    options: dict[str, Any] = {"dtype": target.dtype, "device": target.device}
    features = torch.empty(starts[-1], width, **options)
    last_hidden = torch.empty(starts[-1], target.hidden_size, **options)
    states_of = ComputedStates(target)
    order = sorted(range(len(rows)), key=lens.__getitem__, reverse=True)
    done = 0
    while done < len(rows):
        batch = order[done : done + max(1, batch_tokens // (lens[order[done]] + 1))]
        states = states_of([rows[i] for i in batch])
        for i, row_features, row_hidden in zip(batch, states.features, states.last_hidden, strict=True):
            part = slice(starts[i], starts[i + 1])
            features[part] = row_features[: lens[i]]
            last_hidden[part] = row_hidden[: lens[i]]
        done += len(batch)
    views = zip(features.split(lens), last_hidden.split(lens), strict=True)
    return [StoredText(row.input_ids, row.prompt_len, *view) for row, view in zip(rows, views, strict=True)]


def padded_ids(rows: Sequence[Text]) -> Tensor:
    """Token ids ``[bs, S]``, 0 as padding on the right."""
    ids = torch.zeros(len(rows), max(len(row.input_ids) for row in rows), dtype=torch.long)
    for padded_row, row in zip(ids, rows, strict=True):
        padded_row[: len(row.input_ids)] = row.input_ids
    return ids
