"""A synthetic pair with a confidence head that knows everything.

The probability that a draft is accepted, given the token before it, is the overlap of the two distributions there. A
head that reports exactly this reveals as much about the draft before as any head could: what a leaky rule needs.
"""

import torch
from draft_heads import as_weights, draft_heads
from dspark_kernels import AcceptResult, DraftBlock, RoundKeys, SamplingBatch, Windows, accept_ref, draft_block_ref
from scipy import stats

_MIN_EXPECTED = 5  # of a cell of a chi-square test; tokens that are rarer share one


class ConfidentPair:
    """A target that is a table by previous token, and the real vanilla Markov head imitating it with errors.

    Distributions are flat, so that every token comes up, and the drafter is good after even tokens and bad after odd
    ones.

    Attributes:
        overlap: [gamma, V] probability that draft j is accepted, by the token before it.
    """

    def __init__(self, *, temperature: float = 1.0, vocab_size: int = 6, gamma: int = 3) -> None:
        generator = torch.Generator().manual_seed(1)
        self.gamma, self.vocab_size, self._temperature = gamma, vocab_size, temperature
        target_logits = torch.randn(vocab_size, vocab_size, generator=generator) * 1.5
        self._base_logits = torch.randn(gamma, vocab_size, generator=generator) * 0.12
        errors = torch.randn(vocab_size, vocab_size, generator=generator)
        errors *= torch.tensor([0.6, 3.0])[torch.arange(vocab_size) % 2, None]
        self.target_logits = target_logits * 0.5  # [previous, V]
        bias = self.target_logits + errors
        markov, _ = draft_heads("vanilla", vocab_size=vocab_size, hidden_size=2, block_size=gamma, rank=vocab_size)
        markov.markov_w1.weight.data = torch.eye(vocab_size)
        markov.markov_w2.weight.data = bias.T.contiguous()
        self._heads = as_weights(markov, None)
        self.target = (self.target_logits / temperature).softmax(-1)  # [previous, V]
        draft = ((self._base_logits[:, None] + bias) / temperature).softmax(-1)
        self.overlap = torch.minimum(draft, self.target).sum(-1)

    def draft(self, anchors: torch.Tensor, step: int) -> DraftBlock:
        """A block per request; its confidences are logits of the overlap."""
        bs = len(anchors)
        block = draft_block_ref(
            self._base_logits.expand(bs, -1, -1),
            torch.zeros(bs, self.gamma, 2),
            anchors,
            self._heads,
            self._rows(bs),
            self.keys(bs, step),
        )
        before = torch.cat([anchors[:, None], block.tokens[:, :-1]], dim=1)
        confidence = self.overlap[torch.arange(self.gamma), before]
        return DraftBlock(block.tokens, block.probs, torch.logit(confidence, eps=1e-6))

    def _rows(self, bs: int) -> SamplingBatch:
        return SamplingBatch.from_lists(*([value] * bs for value in (self._temperature, -1, 1.0, 0.0, None)))

    def keys(self, bs: int, step: int) -> RoundKeys:
        return RoundKeys(11, step, torch.arange(bs), torch.zeros(bs, dtype=torch.int64))

    def accept(self, anchors: torch.Tensor, block: DraftBlock, lens: torch.Tensor, step: int) -> AcceptResult:
        """Verify the first ``lens`` drafts."""
        chain = torch.cat([anchors[:, None], block.tokens], dim=1)
        logits = self.target_logits[chain[torch.arange(chain.shape[1]) <= lens[:, None]]]
        indptr = torch.nn.functional.pad((lens + 1).cumsum(0), (1, 0))
        rows, keys = self._rows(len(lens)), self.keys(len(lens), step)
        return accept_ref(block, Windows(lens, indptr), logits, keys.positions, rows, keys)

    def distribution_p_value(self, anchors: torch.Tensor, out_tokens: torch.Tensor) -> float:
        """Chi-square: does every emitted token [n, gamma + 1] follow the target, given the token before it?

        One cell per slot, token before and token: what a scheduler favours differs between tokens.
        """
        target = self.target.double()
        chain = torch.cat([anchors[:, None], out_tokens], dim=1)
        statistic, freedom = 0.0, 0
        for before, tokens in zip(chain.T, out_tokens.T, strict=False):
            emitted = tokens >= 0
            for previous in range(self.vocab_size):
                counts = torch.bincount(tokens[emitted & (before == previous)], minlength=self.vocab_size).double()
                expected = counts.sum() * target[previous]
                rare = expected < _MIN_EXPECTED
                observed = torch.cat([counts[~rare], counts[rare].sum()[None]])
                expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
                used = expected >= _MIN_EXPECTED
                statistic += float(((observed - expected)[used] ** 2 / expected[used]).sum())
                freedom += max(0, int(used.sum()) - 1)
        return float(stats.chi2.sf(statistic, freedom))
