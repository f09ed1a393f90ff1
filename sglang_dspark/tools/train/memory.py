"""How much memory a training run needs beside the target and the texts, counted from shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sglang_dspark.draft.config import DraftConfig
from sglang_dspark.draft.model import DraftModel
from sglang_dspark.tools.train.attention import CHUNK_SCORES
from sglang_dspark.tools.train.batches import rows_of_piece
from sglang_dspark.tools.train.config import TrainConfig
from sglang_dspark.tools.train.loss import rows_of_chunk

# float32 weights, gradients and two moments, and the 16-bit copy of the weights that matrix products use.
_PARAMETER_BYTES = 18
# Kept for the backward pass, measured with autograd's hooks in float32 and bfloat16, rounded up: per element of what a
# slot or a context token is wide.
_WIDTH_BYTES = 8
# Of a score that attention holds at a time: as computed, masked, in the softmax and its gradient.
_SCORE_BYTES = 16
# Of a logit that the loss holds at a time: the draft's and the target's, their gradient and float32 copies.
_LOGIT_BYTES = 16


@dataclass(frozen=True)
class TrainingBytes:
    """Of one process."""

    parameters: int  # trained weights, their gradients, moments and 16-bit copies
    activations: int  # kept of one piece of a step until its backward pass
    transient: int  # of one attention and one chunk of the loss, at their largest

    @property
    def total(self) -> int:
        return self.parameters + self.activations + self.transient


def training_bytes(config: TrainConfig, target_config: Any, longest: int, processes: int = 1) -> TrainingBytes:
    """Bytes of weights, gradients, optimizer and one step, at most.

    Args:
        target_config: the target's transformers text configuration.
        longest: tokens of the longest text.
        processes: that share the texts of a step.
    """
    draft = config.draft_config(target_config)
    rows = rows_of_piece(config.batch_rows, config.micro_batch_rows or config.batch_rows, processes)
    slots = rows * config.anchors_per_row * draft.block_size
    width = draft.num_hidden_layers * (6 * draft.hidden_size + 3 * draft.intermediate_size)
    width += draft.num_hidden_layers * (draft.num_attention_heads + 2 * draft.num_key_value_heads) * draft.head_dim
    context = (draft.num_taps + 1) * draft.hidden_size
    context += 2 * draft.num_hidden_layers * draft.num_key_value_heads * draft.head_dim
    return TrainingBytes(
        parameters=trained_parameters(draft) * _PARAMETER_BYTES,
        activations=(slots * width + rows * longest * context) * _WIDTH_BYTES,
        transient=_attention_bytes(config, draft, rows, slots, longest) + _loss_bytes(config, draft, slots),
    )


def trained_parameters(draft: DraftConfig) -> int:
    """Parameters of a drafter that reads the target's embedding and LM head."""
    with torch.device("meta"):
        model = DraftModel(draft, own_embedding=False, own_lm_head=False)
    return sum(parameter.numel() for parameter in model.parameters())


def _attention_bytes(config: TrainConfig, draft: DraftConfig, rows: int, slots: int, longest: int) -> int:
    scores = slots * draft.num_attention_heads * (longest + draft.block_size)
    # A chunk has at least one anchor of each text.
    chunk = min(scores, max(CHUNK_SCORES, scores // config.anchors_per_row))
    if not config.device.startswith("cuda"):
        return chunk * _SCORE_BYTES
    # flex_attention has no scores, but keys and values of context and blocks side by side, and their gradients. Chunks
    # take their turn when held-out texts are measured.
    keys = rows * longest + slots
    beside = 4 * keys * draft.num_key_value_heads * draft.head_dim * _WIDTH_BYTES
    return max(chunk * _SCORE_BYTES, beside)


def _loss_bytes(config: TrainConfig, draft: DraftConfig, slots: int) -> int:
    tokens = config.loss_vocab + config.loss_vocab_sampled if config.loss_vocab else draft.vocab_size
    chunk = min(slots, rows_of_chunk(tokens, config.device.partition(":")[0])) * tokens
    return chunk * _LOGIT_BYTES + 4 * tokens * (draft.markov_rank + draft.hidden_size)
