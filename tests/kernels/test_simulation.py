"""Acceptance by chance: what is kept of a block, and how often."""

import pytest
import torch
from dspark_kernels import AcceptResult, mask_tokens, simulated_accept
from scipy import stats

PROFILE = (0.9, 0.4, 1.0, 0.5, 0.7, 0.0, 0.8)


def case(bs, gamma, device):
    """Judged blocks of ``gamma`` drafts, a part of which is under verification."""
    generator = torch.Generator().manual_seed(0)

    def ints(*shape, most=1000):
        return torch.randint(0, most, shape, generator=generator)

    verify_lens = ints(bs, most=gamma + 1)
    accept_lens = (torch.rand(bs, generator=generator) * (verify_lens + 1)).long()
    judged = AcceptResult(
        accept_lens.to(device), ints(bs).to(device), ints(bs, gamma + 1).to(device), (500 + accept_lens + 1).to(device)
    )
    # A part of a wider buffer, as the drafts of a captured step are.
    drafts = ints(bs, gamma + 3).to(device)[:, :gamma]
    return judged, drafts, verify_lens.to(device)


@pytest.mark.parametrize("unlucky", [0, 1, 3, 9])
@pytest.mark.parametrize(("bs", "gamma"), [(1, 0), (1, 1), (3, 5), (17, 7), (130, 4)])
def test_drafts_are_kept_up_to_the_first_unlucky_one(bs, gamma, unlucky, device):
    judged, drafts, verify_lens = case(bs, gamma, device)
    profile = torch.ones(10, dtype=torch.float64, device=device)
    profile[unlucky] = 0
    lens = [min(unlucky, length) for length in verify_lens.tolist()]
    accepted = simulated_accept(judged, drafts, verify_lens, profile)
    assert accepted.accept_lens.tolist() == lens
    bonus = judged.bonus_tokens.tolist()
    expected = [
        [*block[:length], token, *[-1] * (gamma - length)]
        for block, length, token in zip(drafts.tolist(), lens, bonus, strict=True)
    ]
    assert accepted.out_tokens.tolist() == expected
    assert accepted.bonus_tokens.tolist() == bonus
    assert accepted.new_seq_lens.tolist() == [500 + length + 1 for length in lens]


def test_positions_are_kept_as_often_as_they_should_be(device):
    """Exact binomial tests at 1e-4: fewer than one run in a thousand fails by chance, and the seed is fixed."""
    torch.manual_seed(0)
    judged, drafts, _ = case(2000, 7, device)
    profile = torch.tensor(PROFILE, dtype=torch.float64, device=device)
    accepted = simulated_accept(judged, drafts, torch.full((2000,), 7, device=device), profile)
    lens = accepted.accept_lens
    for slot, probability in enumerate(PROFILE):
        reached, kept = int((lens >= slot).sum()), int((lens > slot).sum())
        if reached and 0 < probability < 1:
            assert stats.binomtest(kept, reached, probability).pvalue > 1e-4
        else:
            assert kept == reached * probability
    assert (lens == 5).sum() > 100


@pytest.mark.parametrize(("vocab_size", "words"), [(1, 1), (32, 1), (70, 3), (70, 2), (257, 9)])
def test_only_allowed_tokens_keep_their_logits(vocab_size, words, device):
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(5, vocab_size, generator=generator)
    bitmask = torch.randint(-(2**31), 2**31, (3, words), generator=generator).to(torch.int32)
    rows = [4, 0, 2]
    expected = logits.clone()
    for row, mask in zip(rows, bitmask.tolist(), strict=True):
        for token in range(vocab_size):
            if token // 32 >= words or not mask[token // 32] >> (token % 32) & 1:
                expected[row, token] = -torch.inf
    masked = logits.to(device)
    mask_tokens(masked, torch.tensor(rows, device=device), bitmask.to(device))
    assert torch.equal(masked.cpu(), expected)
    assert torch.equal(masked[[1, 3]].cpu(), logits[[1, 3]])
