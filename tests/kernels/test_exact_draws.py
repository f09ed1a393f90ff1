"""Draws at the probabilities and sizes of real servers, whose errors are too small for tests on a small vocabulary."""

import pytest
import torch
from dspark_kernels import (
    DraftBlock,
    DraftDistribution,
    Purpose,
    RoundKeys,
    SamplingBatch,
    Windows,
    accept_ref,
    draw,
    exponential,
    inverse_cdf,
    sampling,
    seeded_argmax,
    target_probs,
)

VOCAB_SIZE = 152_064


def sampled_rows(num, top_p=1.0):
    return SamplingBatch.from_lists([1.0] * num, [-1] * num, [top_p] * num, [0.0] * num, [None] * num)


def one_draft(target, draft, tokens, copied=None):
    """Kept counts, next tokens, and the uniforms of acceptance of one draft per request from distributions [V]."""
    num = len(tokens)
    keys = RoundKeys(5, 1, torch.arange(num), torch.zeros(num, dtype=torch.int64))
    distribution = DraftDistribution(draft.log().expand(num, 1, -1), torch.zeros(num, 1))
    block = DraftBlock(tokens[:, None], distribution=distribution, copied=copied)
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
    """The result is equal to the last bit, which decides between tokens of a seeded request."""
    logits = torch.randn(8, 50_000, generator=torch.Generator().manual_seed(2))
    probs = torch.softmax(logits, -1)
    kept = target_probs(logits, sampled_rows(8, top_p=0.9).filter_params)
    mass = probs.where(kept > 0, 0.0).sum(-1, keepdim=True, dtype=torch.float64).float()
    assert torch.equal(kept, probs.where(kept > 0, 0.0) / mass)


def test_inverse_cdf_inverts_the_cumulative_sum():
    weights = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]])
    cases = {0.0: 1, 0.2499: 1, 0.25: 3, 0.5: 3, 0.7499: 3, 0.75: 4, 1 - 2**-53: 4}
    uniforms = torch.tensor(list(cases), dtype=torch.float64)
    assert inverse_cdf(weights.expand(len(cases), -1), uniforms).tolist() == list(cases.values())
    assert inverse_cdf(weights.expand(len(cases), -1) * 3e-6, uniforms).tolist() == list(cases.values())


@pytest.mark.parametrize("vocab_size", [1, 2, 111, 50_000])
def test_inverse_cdf_never_returns_an_impossible_token(vocab_size):
    generator = torch.Generator().manual_seed(vocab_size)
    weights = torch.rand(50, vocab_size, generator=generator) * (torch.rand(50, vocab_size, generator=generator) < 0.3)
    weights[:, vocab_size // 2] += 1e-30
    for u in (0.0, 1e-300, 0.5, 1 - 2**-53):
        tokens = inverse_cdf(weights, torch.full((50,), u, dtype=torch.float64))
        assert (weights.gather(1, tokens[:, None]) > 0).all()


def test_broken_logits_give_an_id_of_the_vocabulary():
    weights = torch.full((2, 9), torch.nan)
    assert (inverse_cdf(weights, torch.tensor([0.0, 0.9], dtype=torch.float64)) < 9).all()


def test_seeded_argmax_is_the_gumbel_argmax():
    probs = torch.randn(20, 101, generator=torch.Generator().manual_seed(3)).mul(2).softmax(-1)
    probs[:, 10:30] = 0.0
    seeds, positions = torch.arange(20) * 12345, torch.arange(20) % 4
    gumbel = -exponential(seeds, positions, 101).log()
    assert torch.equal(seeded_argmax(probs, seeds, positions), (probs.double().log() + gumbel).argmax(-1))


@pytest.mark.parametrize("density", [0.01, 0.5])
def test_blocks_sparse_rows_and_the_accelerators_route_agree(monkeypatch, density):
    generator = torch.Generator().manual_seed(8)
    probs = torch.rand(9, 1001, generator=generator) * (torch.rand(9, 1001, generator=generator) < density)
    seeds, positions = torch.arange(9), torch.arange(9) * 3
    monkeypatch.setattr(sampling, "_NOISE_BLOCK", 2500)
    tokens = seeded_argmax(probs, seeds, positions)
    monkeypatch.setattr(sampling, "reads_are_free", lambda _: False)
    assert torch.equal(tokens, seeded_argmax(probs, seeds, positions))
    rows, drawn = [], sampling.exponential
    monkeypatch.setattr(sampling, "exponential", lambda seeds, *of: (rows.append(len(seeds)), drawn(seeds, *of))[1])
    monkeypatch.setattr(sampling, "_DEVICE_NOISE_BLOCK", 4100)
    assert torch.equal(tokens, seeded_argmax(probs, seeds, positions))
    assert rows == [4, 4, 1]


def test_each_request_of_a_mixed_batch_is_drawn_by_its_own_rule():
    temperatures, top_ks = [0, 1.0, 0.6, 1.0, 0, 1.3], [-1, -1, 5, -1, -1, 3]
    seeds = [None, None, 8, None, 4, 9]
    rows = SamplingBatch.from_lists(temperatures, top_ks, [1, 0.9, 1, 1, 1, 1], [0, 0, 0, 0.1, 0, 0], seeds)
    logits = torch.randn(6, 111, generator=torch.Generator().manual_seed(4)) * 2
    keys = RoundKeys(7, 8, torch.tensor([50, 60, 70, 80, 90, 100]), torch.arange(6) + 20)
    tokens = draw(logits, rows, keys)
    uniforms = keys.uniform(0, Purpose.BONUS)
    for r in range(6):
        probs = target_probs(logits[r : r + 1], rows.filter_params.expand(torch.tensor([r])))
        if temperatures[r] == 0:
            expected = logits[r].argmax()
        elif seeds[r] is None:
            expected = inverse_cdf(probs, uniforms[r : r + 1])
        else:
            expected = seeded_argmax(probs, torch.tensor([seeds[r]]), torch.tensor([20 + r]))
        assert tokens[r] == expected


def test_greedy_takes_the_first_maximum():
    rows = SamplingBatch.from_lists([0.0], [-1], [1], [0], [None])
    keys = RoundKeys(0, 0, torch.tensor([0]), torch.tensor([0]))
    assert draw(torch.tensor([[1.0, 5.0, 5.0, 5.0]]), rows, keys).tolist() == [1]
