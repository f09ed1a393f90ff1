"""Draws at the probabilities and sizes of real servers, whose errors are too small for tests on a small vocabulary."""

import torch
from dspark_kernels import DraftBlock, Purpose, RoundKeys, SamplingBatch, Windows, accept_ref, inverse_cdf, target_probs

VOCAB_SIZE = 152_064


def sampled_rows(num, top_p=1.0):
    return SamplingBatch.from_lists([1.0] * num, [-1] * num, [top_p] * num, [0.0] * num, [None] * num)


def one_draft(target, draft, tokens, copied=None):
    """Kept counts, next tokens, and the uniforms of acceptance of one draft per request from distributions [V]."""
    num = len(tokens)
    keys = RoundKeys(5, 1, torch.arange(num), torch.zeros(num, dtype=torch.int64))
    block = DraftBlock(tokens[:, None], draft.expand(num, 1, -1), copied=copied)
    windows = Windows(torch.ones(num, dtype=torch.int64), torch.arange(0, 2 * num + 1, 2))
    logits = target.log().expand(2 * num, -1)
    accepted = accept_ref(block, windows, logits, keys.positions, sampled_rows(num), keys)
    return accepted.accept_lens, accepted.bonus_tokens, keys.block_uniform(1, Purpose.ACCEPT)[:, 0]


def test_a_copied_draft_is_kept_with_the_targets_probability():
    """Beside drafts of the drafter, whose distribution holds another value at the copied token."""
    num = 20_000
    target, draft = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.9, 0.05, 0.05])
    copied = torch.arange(num) % 2 == 0
    kept, _, uniforms = one_draft(target, draft, torch.zeros(num, dtype=torch.int64), copied[:, None])
    expected = uniforms * torch.where(copied, 1.0, draft[0].double()) < target[0].double()
    assert torch.equal(kept == 1, expected)
    assert 0.45 < kept[copied].double().mean() < 0.5 + 0.05


def test_a_small_residual_is_drawn_from():
    """If distributions differ by a thousandth, a rejected draft gives way to the token that was proposed too seldom."""
    num = 100_000
    draft = torch.tensor([0.5, 0.3, 0.2])
    target = draft + torch.tensor([-1e-3, 0.0, 1e-3])
    kept, tokens, _ = one_draft(target, draft, torch.zeros(num, dtype=torch.int64))
    assert (kept == 0).sum() > 100
    assert (tokens[kept == 0] == 2).all()


def test_no_token_of_a_large_vocabulary_is_out_of_reach():
    weights = (3 * torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(1))).softmax(0)
    cumulative = weights.double().cumsum(0)
    tail = torch.arange(VOCAB_SIZE - 64, VOCAB_SIZE)
    middle = (cumulative[tail] - weights[tail].double() / 2) / cumulative[-1]
    assert torch.equal(inverse_cdf(weights.expand(64, -1), middle), tail)


def test_what_is_kept_is_divided_by_its_mass():
    """To the last bit: it decides between tokens of a seeded request."""
    logits = torch.randn(8, 50_000, generator=torch.Generator().manual_seed(2))
    probs = torch.softmax(logits, -1)
    kept = target_probs(logits, sampled_rows(8, top_p=0.9).filter_params)
    mass = probs.where(kept > 0, 0.0).sum(-1, keepdim=True, dtype=torch.float64).float()
    assert torch.equal(kept, probs.where(kept > 0, 0.0) / mass)
