"""Starting point of a drafter: small random layers, the target's final norm, Markov embeddings that know the tokens.

Starting from the target's own last layers was tried and is worse: they expect a residual stream that 28 layers have
filled, and get bare embeddings (SmolLM2-135M, 11 500 blocks: expected tokens per round 1.20 against 1.28 from random
layers, and 1.23 from its first two layers).
"""

from __future__ import annotations

import torch
from torch import nn

from sglang_dspark.draft.model import DraftModel
from sglang_dspark.train.target import Target

_WEIGHT_STD = 0.02  # Hugging Face's default, DeepSpec's too
# Share of the target's final norm weight: untrained hidden states would give confident nonsense at full scale.
_NORM_SHARE = 0.5
# Root mean square of the Markov embeddings; the biases start at zero through markov_w2. At 0.3 the biases of SmolLM2's
# drafter were still below 0.5 after 60 steps.
_W1_RMS = 1.0


@torch.no_grad()
def initialise(model: DraftModel, target: Target, generator: torch.Generator) -> None:
    """Set all trainable parameters of `model`, which is float32, on the CPU and bound to the target's embedding."""
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            nn.init.ones_(parameter)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
        else:
            nn.init.normal_(parameter, std=_WEIGHT_STD, generator=generator)
    model.norm.weight.copy_(target.backbone.norm.weight * _NORM_SHARE)
    if model.markov is not None:
        _initialise_markov(model)


def _initialise_markov(model: DraftModel) -> None:
    """W1 = principal components of the token embeddings, so that tokens rare in the corpus start near similar ones."""
    embeddings = model.embed_weight.float()
    centred = embeddings - embeddings.mean(dim=0)
    _, vectors = torch.linalg.eigh(centred.T @ centred)  # ascending eigenvalues
    rank = min(model.config.markov_rank, model.config.hidden_size)
    components = centred @ vectors[:, -rank:]
    w1 = model.markov.markov_w1.weight
    w1[:, :rank] = components * (_W1_RMS / components.square().mean(dim=0).sqrt())
    nn.init.zeros_(model.markov.markov_w2.weight)
