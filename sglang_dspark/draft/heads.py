"""The two heads of the draft network.

The Markov head is a low-rank bias on the draft logits that depends on the token just drafted (DSpark paper, Eqs. 4-6).

With ``e = W1[x_{k-1}]`` and h the post-norm backbone hidden of slot k, the bias added to the base logits is ``W2 u``:

* vanilla: ``u = e``
* gated: ``u = sigmoid(G [h ; e] + b) * e`` (DeepSpec only; the paper has no such variant)
* selector: ``u = (P h) * e``, among the tokens of a shortlist (DFlash 2);
* rnn: ``(g, c, o) = split(J [s ; e ; h] + b)``, ``u = tanh(o)`` and ``s' = sigmoid(g) s + (1 - sigmoid(g)) tanh(c)``;
  all three branches read the *old* state s, which is zero at the start of every block.

The confidence head says how likely a draft is accepted, given that all before it were (DSpark paper, Eq. 7).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang_dspark.draft.config import DraftConfig


class MarkovHead(nn.Module):
    """The vanilla head, whose bias depends only on the previous token (Eq. 4); subclasses form the latent otherwise."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.rank = config.markov_rank
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.num_proposed, bias=False)

    def initial_state(self, bs: int, device: torch.device, dtype: torch.dtype) -> Tensor | None:
        """Return the state before a block's first slot: ``[bs, r]`` zeros for rnn, None for the stateless heads."""
        return None

    def latent(self, w1_embedding: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return ``(u [..., r], new state)`` of ``w1_embedding [..., r], hidden [..., d]``; bias = ``markov_w2(u)``."""
        return w1_embedding, None


class GatedMarkovHead(MarkovHead):
    """The embedding is gated per channel by the hidden state and itself."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config)
        self.gate_proj = nn.Linear(config.hidden_size + config.markov_rank, config.markov_rank)

    def latent(self, w1_embedding: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """See :meth:`MarkovHead.latent`."""
        gate = torch.sigmoid(self.gate_proj(torch.cat((hidden, w1_embedding), dim=-1)))
        return gate * w1_embedding, None


class SelectorMarkovHead(MarkovHead):
    """The embedding is weighted per channel by a projection of the hidden state: DFlash 2's candidate selector."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config)
        self.hidden_projection = nn.Linear(config.hidden_size, config.markov_rank, bias=False)

    def latent(self, w1_embedding: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """See :meth:`MarkovHead.latent`."""
        return self.hidden_projection(hidden) * w1_embedding, None


class RnnMarkovHead(MarkovHead):
    """Eqs. 5-6: a gated recurrence over the block, so the bias depends on all tokens drafted so far."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config)
        self.joint_proj = nn.Linear(2 * config.markov_rank + config.hidden_size, 3 * config.markov_rank)

    def initial_state(self, bs: int, device: torch.device, dtype: torch.dtype) -> Tensor | None:
        """Return ``[bs, r]`` zeros."""
        return torch.zeros(bs, self.rank, device=device, dtype=dtype)

    def latent(self, w1_embedding: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """See :meth:`MarkovHead.latent`."""
        assert state is not None, "each block starts from initial_state()"
        gate, candidate, output = self.joint_proj(torch.cat((state, w1_embedding, hidden), dim=-1)).chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return torch.tanh(output), gate * state + (1 - gate) * torch.tanh(candidate)


_HEADS: dict[str, type[MarkovHead]] = {
    "vanilla": MarkovHead,
    "gated": GatedMarkovHead,
    "rnn": RnnMarkovHead,
    "selector": SelectorMarkovHead,
}


def build_markov_head(config: DraftConfig) -> MarkovHead | None:
    """Return the head that ``config.markov_head_type`` names, or None when ``markov_rank`` is 0."""
    if config.markov_head_type is None:
        return None
    return _HEADS[config.markov_head_type](config)


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
            assert w1_embedding is not None, "this head reads the Markov embeddings of the tokens before"
            features = torch.cat((features, w1_embedding.float()), dim=-1)
        with torch.autocast(features.device.type, enabled=False):
            return F.linear(features, self.proj.weight.float(), self.proj.bias.float()).squeeze(-1)
