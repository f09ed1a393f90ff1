"""Anchors: the positions of a text at which a block is drafted during training (facts of the DeepSpec recipe).

An anchor t is a token of an answer; its block predicts the tokens t+1 .. t+gamma and reads the target's states of the
positions before t only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from dspark_kernels import to_device
from torch import Tensor

from dspark_training.target import TargetStates
from dspark_training.texts import Text, padded_ids


@dataclass(frozen=True)
class AnchorBatch:
    """Rows of text with A anchors each; rows are padded on the right, unused anchors have no supervised slot."""

    features: Tensor  # [bs, S, m * d]
    anchors: Tensor  # [bs, A] int64, position of each anchor
    anchor_ids: Tensor  # [bs, A] int64, token at the anchor
    labels: Tensor  # [bs, A, gamma] int64, the text after the anchor; arbitrary where not supervised
    supervised: Tensor  # [bs, A, gamma] bool, a prefix of each block
    slots: Tensor  # [n] int64, flat indices of the supervised slots; found on the CPU, so that no step waits for a GPU
    target_hidden: Tensor  # [n, d] target's last hidden state at the position before the label of each of these slots

    @property
    def prev_ids(self) -> Tensor:
        """Return the teacher-forced previous tokens ``[bs, A, gamma]``: the anchor, then all labels except the last."""
        return torch.cat([self.anchor_ids[..., None], self.labels[..., :-1]], dim=-1)


def sample_anchors(row: Text, num_anchors: int, generator: torch.Generator) -> Tensor:
    """Return at most `num_anchors` anchors of `row`, uniform without replacement, ascending: ``[n]``.

    They and the tokens after them are in the answer; so the last prompt token is never an anchor.
    """
    num_candidates = max(0, len(row.input_ids) - 1 - row.prompt_len)
    return torch.randperm(num_candidates, generator=generator)[:num_anchors].sort().values + row.prompt_len


def collate(rows: Sequence[Text], anchors: Sequence[Tensor], states: TargetStates, gamma: int) -> AnchorBatch:
    """Pad `rows` and their anchors into one batch, on the device of their `states`.

    Each anchor has `gamma` labels. The supervised slots of a block are those whose label lies inside the row: a row
    ends with its answer, so they are a prefix of the block.
    """
    device = states.features.device
    bs, num_anchors = len(rows), max(1, *map(len, anchors))
    ids = padded_ids(rows)
    padded_anchors = torch.zeros(bs, num_anchors, dtype=torch.long)
    used = torch.zeros(bs, num_anchors, dtype=torch.bool)
    for i, chosen in enumerate(anchors):
        padded_anchors[i, : len(chosen)] = chosen
        used[i, : len(chosen)] = True
    lens = torch.tensor([len(row.input_ids) for row in rows])
    label_positions = padded_anchors[..., None] + torch.arange(1, gamma + 1)  # [bs, A, gamma]
    supervised = (label_positions < lens[:, None, None]) & used[..., None]
    label_positions = label_positions.clamp(max=ids.shape[1] - 1)
    index = torch.arange(bs)[:, None]
    slots = supervised.flatten().nonzero()[:, 0]
    # Flat over rows and positions.
    before = (index[..., None] * states.last_hidden.shape[1] + label_positions - 1).flatten()[slots]
    return AnchorBatch(
        features=states.features,
        anchors=to_device(padded_anchors, device),
        anchor_ids=to_device(ids[index, padded_anchors], device),
        labels=to_device(ids[index[..., None], label_positions], device),
        supervised=to_device(supervised, device),
        slots=to_device(slots, device),
        target_hidden=states.last_hidden.flatten(0, 1)[to_device(before, device)],
    )
