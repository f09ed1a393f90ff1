"""How much memory a training run needs beside the target and the texts."""

from __future__ import annotations

from typing import Any

import torch

from sglang_dspark.draft.model import DraftModel
from sglang_dspark.tools.train.config import TrainConfig

# float32 weights, gradients and two moments, and the 16-bit copy of the weights that matrix products use.
_PARAMETER_BYTES = 18
# Kept for the backward pass, measured with autograd's hooks in float32 and bfloat16, rounded up: per attention score
# and layer, and per element of what a slot or a context token is wide. The loss keeps no logits.
_SCORE_BYTES = 9
_WIDTH_BYTES = 8


def training_bytes(config: TrainConfig, target_config: Any, longest: int) -> int:
    """Bytes of weights, gradients, optimizer and the activations of one step, at most.

    Args:
        target_config: the target's transformers text configuration.
        longest: tokens of the longest text.
    """
    draft = config.draft_config(target_config)
    with torch.device("meta"):
        model = DraftModel(draft, own_embedding=False, own_lm_head=False)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    slots = config.batch_rows * config.anchors_per_row * config.num_slots
    scores = slots * draft.num_attention_heads * (longest + config.num_slots)
    width = draft.num_hidden_layers * (6 * draft.hidden_size + 3 * draft.intermediate_size)
    context = (len(draft.target_layer_ids) + 1) * draft.hidden_size
    context += 2 * draft.num_hidden_layers * draft.num_key_value_heads * draft.head_dim
    activations = slots * width + config.batch_rows * longest * context
    return parameters * _PARAMETER_BYTES + scores * draft.num_hidden_layers * _SCORE_BYTES + activations * _WIDTH_BYTES
