"""How much each slot of a block counts in the loss.

- ``decay``: ``exp(-j / position_decay)`` for slot j = 0 .. gamma-1. DeepSpec has 4 there, and the DSpark paper gamma.
- ``dpace``: what the accept length would gain from the slot, as the drafter stands (D-PACE, arXiv 2605.18810, equations
  7 to 9). With q_i the drafter's probability of the text's own token at slot i::

      w_j = sum over m >= j of prod over i <= m of ((1 - alpha) q_i + alpha)

  No gradient flows through the weights. Early slots count most, and later ones more as those before them get better.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dspark_training.settings import LossWeights


def decay_weights(weights: LossWeights, gamma: int, device: torch.device) -> Tensor:
    """``[gamma]`` float32 weights of the slots, 1 for the first."""
    return torch.exp(-torch.arange(gamma, device=device) / weights.position_decay)


def confidence_weights(
    probs: Tensor,  # [n] float32, of the label at each supervised slot
    slots: Tensor,  # [n] flat indices of these slots; a prefix of each block
    num_blocks: int,
    gamma: int,
    alpha: float,
) -> Tensor:
    """D-PACE's weights of the supervised slots: ``[n]`` float32."""
    smoothed = probs.new_zeros(num_blocks * gamma).index_copy(0, slots, (1 - alpha) * probs + alpha)
    reached = smoothed.view(num_blocks, gamma).cumprod(1)  # 0 behind the supervised prefix
    return reached.flip(1).cumsum(1).flip(1).flatten()[slots]
