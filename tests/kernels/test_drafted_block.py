"""Drafted blocks with copied tokens in them."""

import pytest
import torch
from dspark_kernels import DraftBlock, DraftDistribution

BS, GAMMA, VOCAB = 3, 4, 9


def drafted(with_distribution):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(BS, GAMMA, VOCAB, generator=generator)
    distribution = DraftDistribution(scores, scores.logsumexp(-1))
    tokens = torch.randint(1, VOCAB, (BS, GAMMA), generator=generator)
    confidence = torch.randn(BS, GAMMA, generator=generator)
    return DraftBlock(
        tokens,
        None if with_distribution else distribution.probs(),
        confidence,
        distribution if with_distribution else None,
    )


@pytest.mark.parametrize("with_distribution", [False, True])
@pytest.mark.parametrize("width", [2, GAMMA, 6])
def test_copies_replace_drafts_and_leave_the_others_their_distribution(width, with_distribution):
    block = drafted(with_distribution)
    copied = torch.arange(width) < torch.tensor([0, 1, width])[:, None]
    mixed = block.with_copies(torch.full((BS, width), 7), copied)
    wide = max(width, GAMMA)
    assert mixed.tokens.shape == mixed.copied.shape == mixed.confidence_logits.shape == (BS, wide)
    assert mixed.copied.sum(1).tolist() == [0, 1, width]
    assert (mixed.tokens[mixed.copied] == 7).all()
    assert torch.equal(mixed.tokens[:, :GAMMA][~mixed.copied[:, :GAMMA]], block.tokens[~mixed.copied[:, :GAMMA]])
    before, after = (part.distribution.probs() if with_distribution else part.probs for part in (block, mixed))
    assert after.shape == (BS, wide, VOCAB)
    assert torch.equal(after[:, :GAMMA], before)


def test_a_block_without_randomness_stays_without():
    mixed = DraftBlock(torch.ones(2, 3, dtype=torch.int64), None, None).with_copies(
        torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3, dtype=torch.bool)
    )
    assert (mixed.probs, mixed.distribution, mixed.confidence_logits) == (None, None, None)
