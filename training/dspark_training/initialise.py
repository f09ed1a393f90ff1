"""Starting point of a drafter: a first layer that reads its neighbourhood, small random weights elsewhere.

History reaches a block only through attention to the context rows, and with random weights that attention is nearly
uniform: it averages the whole text, the average says little about the next token, and so there is little gradient to
sharpen it. For thousands of steps only the Markov head learns. Three things help.

- `fc` is scaled by the size of each feature. A residual stream carries a few huge, constant channels, behind which the
  projected context of a plain random matrix is the same for every token.
- The first layer's attention is positional: its keys are one constant vector and the query of each head is that vector
  turned by `delta` positions, so that the head of slot j reads row t + j - delta, whatever stands there.
- W1 holds principal components of the token embeddings, so that tokens rare in the corpus start near similar ones.

Starting from the target's own last layers was tried and is worse than random layers: they expect a residual stream that
all layers below have filled.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark_training.target import Target
from sglang_dspark.draft.backbone import DecoderLayer
from sglang_dspark.draft.heads import MarkovHead
from sglang_dspark.draft.model import DraftModel

_WEIGHT_STD = 0.02  # Hugging Face's default, DeepSpec's too
# Share of the target's final norm weight: untrained hidden states would give confident nonsense at full scale.
_NORM_SHARE = 0.5
# Root mean square of the Markov embeddings; the biases start at zero through markov_w2. At 0.3 the biases of SmolLM2's
# drafter were still below 0.5 after 60 steps.
_W1_RMS = 1.0
# Offsets in positions that the query heads of successive key/value heads read. Offset 1 occurs in every group: slot 0
# has the full width of the last context row in front of it.
_OFFSETS = ((1, 2, 3), (1, 2, 4), (1, 3, 5), (1, 2, 6))
# The fastest rotary frequencies tell neighbouring positions apart; together they repeat only far away.
_POSITIONAL_FREQUENCIES = 6
# Gain of q_norm and k_norm in the positional layer: neighbouring offsets then differ by about 5 in the softmax.
_POSITIONAL_GAIN = 2.0


@torch.no_grad()
def initialise(model: DraftModel, target: Target, features: Tensor, generator: torch.Generator) -> None:
    """Set all trainable parameters of `model`.

    Args:
        model: float32, on the CPU, bound to the target's embedding.
        target: gives the final norm.
        features: ``[n, m * d]`` tapped features of some text of the target.
        generator: CPU generator.
    """
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            nn.init.ones_(parameter)
        elif name.endswith(("bias", "kernel_projection.weight")):
            nn.init.zeros_(parameter)
        elif not name.endswith("base_kernel"):  # with its own start, convolutions change nothing
            nn.init.normal_(parameter, std=_WEIGHT_STD, generator=generator)
    model.norm.weight.copy_(target.final_norm_weight() * _NORM_SHARE)
    # The median over rows: the first token of a text has channels a thousand times as large as any other's.
    scale = features.float().abs().median(dim=0).values.clamp(min=1e-3)
    model.fc.weight.normal_(std=model.fc.in_features**-0.5, generator=generator).div_(scale)
    _make_positional(model, model.project_context(features.float()))
    if model.markov_head is not None:
        _initialise_markov(model.markov_head, model.embed_weight.float())


def _make_positional(model: DraftModel, context: Tensor) -> None:
    """Turn the first layer's attention into one that depends on relative positions only; `context` is ``[n, d]``."""
    config, attention = model.config, cast(DecoderLayer, model.layers[0]).self_attn
    half, head_dim = config.head_dim // 2, config.head_dim
    frequencies = model.rotary.inv_freq[:_POSITIONAL_FREQUENCIES]
    mask = model.embed_weight[config.mask_token_id].float()
    tokens = F.normalize(model.embed_weight.float(), dim=-1).mean(dim=0)
    # Directions on which practically every context row, and every block row, has a positive component.
    block_direction = F.normalize(F.normalize(tokens, dim=0) + F.normalize(mask, dim=0), dim=0)
    key_direction = F.normalize(context.mean(dim=0), dim=0) + block_direction

    key = torch.zeros(head_dim)
    key[: len(frequencies)] = 1.0
    attention.k_proj.weight.mul_(0.1).add_(torch.outer(key, key_direction).repeat(config.num_key_value_heads, 1))
    group = config.num_attention_heads // config.num_key_value_heads
    for head in range(config.num_attention_heads):
        offsets = _OFFSETS[(head // group) % len(_OFFSETS)]
        angles = -offsets[head % group % len(offsets)] * frequencies
        query = torch.zeros(head_dim)
        query[: len(frequencies)] = angles.cos()
        query[half : half + len(frequencies)] = angles.sin()
        rows = slice(head * head_dim, (head + 1) * head_dim)
        attention.q_proj.weight[rows].mul_(0.1).add_(torch.outer(query, block_direction))
    attention.q_norm.weight.fill_(_POSITIONAL_GAIN)
    attention.k_norm.weight.fill_(_POSITIONAL_GAIN)


def _initialise_markov(markov: MarkovHead, embeddings: Tensor) -> None:
    centred = embeddings - embeddings.mean(dim=0)
    _, vectors = torch.linalg.eigh(centred.T @ centred)  # ascending eigenvalues
    rank = min(markov.rank, embeddings.shape[1])
    components = centred @ vectors[:, -rank:]
    w1 = markov.markov_w1.weight
    w1[:, :rank] = components * (_W1_RMS / components.square().mean(dim=0).sqrt())
    nn.init.zeros_(markov.markov_w2.weight)
