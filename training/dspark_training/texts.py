"""Texts that the target wrote, and where the trainer gets the target's states of them."""

from __future__ import annotations

from collections.abc import Sequence
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


def states_of(target: Target, rows: Sequence[Text]) -> TargetStates:
    """Return the target's states of texts, those that they bring along or else those of a forward pass.

    What stands at the last token of a text and in its padding on the right is arbitrary.
    """
    stored = [row for row in rows if isinstance(row, StoredText)]
    if len(stored) < len(rows):
        return target.forward(to_device(padded_ids(rows), target.device))
    width = max(len(row.input_ids) for row in rows)

    def padded(states: list[Tensor]) -> Tensor:
        # The states of a row may end one token early, so the longest row alone does not give the width.
        batch = pad_sequence(states, batch_first=True)
        return F.pad(batch, (0, 0, 0, width - batch.shape[1]))

    return TargetStates(padded([row.features for row in stored]), padded([row.last_hidden for row in stored]))


def keep_states(target: Target, rows: Sequence[Text], *, batch_tokens: int) -> list[Text]:
    """Return `rows` with the target's states, which stay on its device: no step of training runs the target then.

    Args:
        batch_tokens: tokens that go through the target together, padding included.
    """
    lens = [len(row.input_ids) - 1 for row in rows]
    starts = list(accumulate(lens, initial=0))
    width = len(target.tap_ids) * target.hidden_size
    options: dict[str, Any] = {"dtype": target.dtype, "device": target.device}
    features = torch.empty(starts[-1], width, **options)
    last_hidden = torch.empty(starts[-1], target.hidden_size, **options)
    order = sorted(range(len(rows)), key=lens.__getitem__, reverse=True)
    done = 0
    while done < len(rows):
        batch = order[done : done + max(1, batch_tokens // (lens[order[done]] + 1))]
        states = states_of(target, [rows[i] for i in batch])
        for i, row_features, row_hidden in zip(batch, states.features, states.last_hidden, strict=True):
            part = slice(starts[i], starts[i + 1])
            features[part] = row_features[: lens[i]]
            last_hidden[part] = row_hidden[: lens[i]]
        done += len(batch)
    views = zip(features.split(lens), last_hidden.split(lens), strict=True)
    return [StoredText(row.input_ids, row.prompt_len, *view) for row, view in zip(rows, views, strict=True)]


def padded_ids(rows: Sequence[Text]) -> Tensor:
    """Return token ids ``[bs, S]``, 0 as padding on the right."""
    ids = torch.zeros(len(rows), max(len(row.input_ids) for row in rows), dtype=torch.long)
    for padded_row, row in zip(ids, rows, strict=True):
        padded_row[: len(row.input_ids)] = row.input_ids
    return ids
