"""Starting point of a drafter: the target's own last layers, made to compute on the draft's inputs what they did before.

From random weights a drafter first has to learn what the target's last layers already do. The draft layers are therefore
the target's last L layers, and `fc` passes the last tap through, so that at step 0 the context keys and values are close to
those the target itself computes there. Each layer's input norm weight is folded into its projections, because one
`hidden_norm` serves the context rows of all layers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sglang_dspark.draft.model import DraftModel
from sglang_dspark.train.target import Target

# Root mean square of the Markov embeddings at the start; the biases start at zero through markov_w2.
_W1_RMS = 0.3


@torch.no_grad()
def initialise(model: DraftModel, target: Target, features: Tensor) -> None:
    """Set all trainable parameters of `model` from `target`.

    Args:
        model: float32, bound to the target's embedding and LM head.
        target: its dimensions equal the draft's, except that the draft's MLPs may be narrower: the neurons with the
            largest output weights are kept then.
        features: ``[n, m * d]`` tapped features of some text; sets the scale of queries and keys where the target does
            not normalise them.
    """
    config = model.config
    d = config.hidden_size
    nn.init.zeros_(model.fc.weight)
    model.fc.weight[:, -d:] = torch.eye(d)
    nn.init.ones_(model.hidden_norm.weight)
    model.norm.weight.copy_(target.backbone.norm.weight)
    context = model.project_context(features.float())
    source_layers = target.backbone.layers[-config.num_hidden_layers :]
    for layer, source in zip(model.layers, source_layers, strict=True):
        _copy_attention(layer, source, context)
        _copy_mlp(layer, source)
    if model.markov is not None:
        _initialise_markov(model)
    if model.confidence is not None:
        nn.init.zeros_(model.confidence.proj.weight)
        nn.init.zeros_(model.confidence.proj.bias)


def _copy_attention(layer: nn.Module, source: nn.Module, context: Tensor) -> None:
    attention, original = layer.self_attn, source.self_attn
    input_norm = source.input_layernorm.weight.float()
    nn.init.ones_(layer.input_layernorm.weight)
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(attention, name).weight.copy_(getattr(original, name).weight.float() * input_norm)
    attention.o_proj.weight.copy_(original.o_proj.weight)
    for projection, norm in (("q_proj", "q_norm"), ("k_proj", "k_norm")):
        weight = getattr(attention, norm).weight
        if hasattr(original, norm):
            weight.copy_(getattr(original, norm).weight)
        else:
            vectors = nn.functional.linear(context, getattr(attention, projection).weight)
            weight.fill_(vectors.square().mean().sqrt())


def _copy_mlp(layer: nn.Module, source: nn.Module) -> None:
    layer.post_attention_layernorm.weight.copy_(source.post_attention_layernorm.weight)
    width = layer.mlp.gate_proj.out_features
    strength = source.mlp.down_proj.weight.float().norm(dim=0) * source.mlp.up_proj.weight.float().norm(dim=1)
    kept = strength.topk(width).indices.sort().values
    layer.mlp.gate_proj.weight.copy_(source.mlp.gate_proj.weight[kept])
    layer.mlp.up_proj.weight.copy_(source.mlp.up_proj.weight[kept])
    layer.mlp.down_proj.weight.copy_(source.mlp.down_proj.weight[:, kept])


def _initialise_markov(model: DraftModel) -> None:
    """W1 = principal components of the token embeddings, so that tokens rare in the corpus start near similar ones."""
    embeddings = model.embed_weight.float()
    centred = embeddings - embeddings.mean(dim=0)
    _, vectors = torch.linalg.eigh(centred.T @ centred)  # ascending eigenvalues
    components = centred @ vectors[:, -model.config.markov_rank :]
    model.markov.markov_w1.weight.copy_(components * (_W1_RMS / components.square().mean(dim=0).sqrt()))
    nn.init.zeros_(model.markov.markov_w2.weight)
    for name, parameter in model.markov.named_parameters():
        if name.endswith("proj.weight"):
            nn.init.normal_(parameter, std=0.02)
        elif name.endswith("proj.bias"):
            nn.init.zeros_(parameter)
