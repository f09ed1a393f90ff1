"""Confidence head: how likely a draft is accepted, given that all before it were (DSpark paper, Eq. 7)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang_dspark.draft.config import DraftConfig


class ConfidenceHead(nn.Module):
    """``logit_k = w . [h_k ; W1[x_{k-1}]] + b``; the probability is its sigmoid.

    Computed in float32 whatever the model's dtype, under autocast too: in bfloat16 the logits are so coarse that many
    probabilities tie or saturate at 1.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.with_markov = config.confidence_head_with_markov
        self.proj = nn.Linear(config.hidden_size + (config.markov_rank if self.with_markov else 0), 1)

    def forward(self, hidden: Tensor, w1_embedding: Tensor | None) -> Tensor:
        """Return the raw (uncalibrated) confidence logits.

        Args:
            hidden: ``[..., d]`` post-norm backbone hidden of the slot.
            w1_embedding: ``[..., r]`` Markov embedding of the token before the slot; ignored (may be None) by a head
                trained without Markov features.

        Returns:
            ``[...]`` float32.
        """
        features = hidden.float()
        if self.with_markov:
            if w1_embedding is None:
                raise ValueError("this confidence head reads Markov embeddings: pass those of the tokens before")
            features = torch.cat((features, w1_embedding.float()), dim=-1)
        with torch.autocast(features.device.type, enabled=False):
            return F.linear(features, self.proj.weight.float(), self.proj.bias.float()).squeeze(-1)
