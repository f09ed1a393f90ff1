"""Tests of draws at the probabilities and sizes of real servers, and of real heads against the literal rules."""

import itertools
from dataclasses import dataclass, field, replace

import pytest
import torch
from acceptance_cases import WalkCase, make_case
from dspark_kernels import (
    DraftBlock,
    DraftDistribution,
    DraftHeads,
    MarkovWeights,
    RoundKeys,
    SamplingBatch,
    Windows,
    accept,
    draft_block,
    sampling,
)
from dspark_kernels.acceptance import acceptance_reference
from dspark_kernels.noise import Purpose, exponential, inverse_cdf
from dspark_kernels.sampling import seeded_argmax, target_probs
from literal import Request, batch_of, literal_accept, literal_distribution, literal_draw, literal_uniform
from reference_decoding import markov_step

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
    accepted = accept.reference(block, windows, logits, keys.positions, sampled_rows(num), keys)
    return accepted.accept_lens, accepted.bonus_tokens, keys.block_uniform(1, Purpose.ACCEPT)[:, 0]


def test_a_copied_draft_is_kept_with_the_targets_probability():
    """Next to drafts of the drafter, whose distribution holds another value at the copied token."""
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


VOCAB = 37
RULES = {
    "greedy": [Request(temperature=0.0)],
    "sampled": [Request(0.7, 5, 0.9), Request(1.0), Request(1.3, min_p=0.1)],
    "seeded": [Request(1.0, seed=3), Request(0.8, 4, 0.9, seed=-4)],
}
RULES["mixed"] = [rule for pair in itertools.zip_longest(*RULES.values()) for rule in pair if rule is not None]


def made(kind, bs, gamma, head_type="vanilla", **options):
    return WalkCase("cpu", RULES[kind], bs=bs, gamma=gamma, v=VOCAB, head_type=head_type, **options)


def drafts_of(request):
    """Drafts are drawn by temperature, without filters."""
    return replace(request, top_k=-1, top_p=1.0, min_p=0.0)


def literal(case, r):
    """Tokens, corrected logits and confidence logits of request r."""
    request, previous = case.requests[r], case.anchors[r : r + 1]
    state = case.markov.initial_state(1, torch.device("cpu"), case.hidden.dtype) if case.markov else None
    tokens, corrected, confidences = [], [], []
    for k in range(case.base.shape[1]):
        hidden = case.hidden[r : r + 1, k]
        logits, embedding = case.base[r, k].float(), None
        if case.markov:
            bias, embedding, state = markov_step(case.markov, previous, hidden, state)
            logits = logits + bias[0].float()
        confidences.append(case.confidence(hidden, embedding).item())
        number = literal_uniform(case.keys, request, k, Purpose.DRAFT)
        tokens.append(literal_draw(logits, drafts_of(request), number, k))
        corrected.append(logits)
        previous = torch.tensor(tokens[-1:])
    return tokens, torch.stack(corrected), confidences


@pytest.mark.parametrize(("bs", "gamma"), [(1, 1), (3, 5), (7, 7)])
@pytest.mark.parametrize("head_type", ["vanilla", "gated", "rnn", None])
@pytest.mark.parametrize("kind", RULES)
def test_the_walk_matches_the_literal_loop(kind, head_type, bs, gamma):
    case = made(kind, bs, gamma, head_type)
    block = case.run(draft_block.reference)
    for r in range(bs):
        tokens, corrected, confidences = literal(case, r)
        assert block.tokens[r].tolist() == tokens
        torch.testing.assert_close(block.confidence_logits[r], torch.tensor(confidences))
        request = case.requests[r]
        if not request.greedy and request.seed is None:
            expected = [literal_distribution(logits, drafts_of(request)) for logits in corrected]
            torch.testing.assert_close(block.distribution.probs()[r], torch.tensor(expected))
    assert (block.distribution is not None) == any(not r.greedy and r.seed is None for r in case.requests)


@dataclass(frozen=True)
class Watched(RoundKeys):
    """Keys that keep the weights of draws."""

    weights: list = field(default_factory=list)

    def drawn(self, weights, uniforms):
        self.weights.append(weights)
        return super().drawn(weights, uniforms)


def test_the_stored_distribution_is_bitwise_the_drawn_one():
    """Verification divides by the numbers the draw used, not by a recomputation of them."""
    case = made("sampled", 5, 4, dtype=torch.bfloat16)
    keys = Watched(**vars(case.keys))
    block = case.run(draft_block.reference, keys=keys)
    drawn, requests = torch.stack(keys.weights, dim=1), torch.arange(5)
    assert torch.equal(block.distribution.probs(), drawn)
    for slot in range(4):
        assert torch.equal(block.distribution.row(requests, torch.full((5,), slot)), drawn[:, slot])
    masses = drawn.gather(2, block.tokens[..., None])[..., 0]
    assert torch.equal(block.distribution.mass(requests[:, None], torch.arange(4), block.tokens), masses)


def test_no_confidence_head_gives_no_confidence():
    case = made("greedy", 2, 3)
    assert case.run(draft_block.reference, heads=replace(case.heads, confidence=None)).confidence_logits is None
    assert case.run(draft_block.reference, with_confidence=False).confidence_logits is None


def test_bfloat16_heads_are_corrected_in_float32():
    """A bfloat16 sum would round the bias away: 256 + 0.5 is 256 in bfloat16."""
    w1, w2 = torch.ones(VOCAB, 1, dtype=torch.bfloat16), torch.tensor([[0.0], [0.5], [0.25]], dtype=torch.bfloat16)
    case = made("greedy", 1, 1)
    case.base = torch.full((1, 1, 3), 256.0, dtype=torch.bfloat16)
    assert case.run(draft_block.reference, heads=DraftHeads(MarkovWeights(w1, w2, None))).tokens.tolist() == [[1]]


def requests_of(kind, bs):
    rules = itertools.islice(itertools.cycle(RULES[kind]), bs)
    return [
        Request(r.temperature, r.top_k, r.top_p, r.min_p, r.seed, key=1000 + 7 * i, position=11 * i)
        for i, r in enumerate(rules)
    ]


def verification(kind, bs, gamma, vocab_size, seed, verify_lens=None):
    """A case whose drafter's distribution is written out, and the requests."""
    requests = requests_of(kind, bs)
    temperatures = [request.temperature for request in requests]
    case = make_case("cpu", temperatures, gamma, vocab_size, seed=seed, verify_lens=verify_lens)
    case.rows, case.keys = batch_of(requests, seed=99, step=seed)
    return case, case.distribution.probs(), requests


def written(probs):
    """The distribution of drafts that has these probabilities [bs, gamma, V]."""
    return DraftDistribution(probs.log(), torch.zeros(probs.shape[:2]))


def accepted_of(case, probs, **changes):
    block, windows, logits, prefix_lens = case.given
    block = replace(block, distribution=None if probs is None else written(probs), **changes)
    return accept.reference(block, windows, logits, prefix_lens, case.rows, case.keys)


def literal_outcome(case, probs, requests, r):
    logits = case.logits[case.indptr[r] : case.indptr[r + 1]]
    given = case.drafts[r].tolist(), int(case.verify_lens[r]), logits, probs[r].double().tolist()
    return literal_accept(*given, requests[r], case.keys)


def assert_outcome(accepted, r, expected):
    padding = [-1] * (accepted.out_tokens.shape[1] - len(expected))
    assert accepted.out_tokens[r].tolist() == expected + padding
    assert accepted.accept_lens[r] == len(expected) - 1
    assert accepted.bonus_tokens[r] == expected[-1]


@pytest.mark.parametrize(("bs", "gamma", "vocab_size"), [(1, 1, 2), (3, 4, 23), (13, 5, 41), (6, 7, 111)])
@pytest.mark.parametrize("kind", RULES)
def test_every_request_matches_the_literal_rule(kind, bs, gamma, vocab_size):
    for seed in range(6):
        case = verification(kind, bs, gamma, vocab_size, seed)
        accepted = accepted_of(*case[:2])
        for r in range(bs):
            assert_outcome(accepted, r, literal_outcome(*case, r))


@pytest.mark.parametrize("kind", RULES)
def test_the_cases_reach_every_outcome(kind):
    """The comparison above would be hollow without full acceptance, rejection at several depths and plain draws."""
    outcomes = set()
    for seed in range(6):
        case, probs, _ = verification(kind, 13, 5, 41, seed)
        outcomes |= set(zip(case.verify_lens.tolist(), accepted_of(case, probs).accept_lens.tolist(), strict=True))
    assert (0, 0) in outcomes
    assert any(verified == kept > 1 for verified, kept in outcomes)
    assert len({kept for verified, kept in outcomes if kept < verified}) >= 3


def test_a_block_without_drafts_is_a_plain_step():
    case, probs, _ = verification("mixed", 7, 5, 41, seed=4, verify_lens=[0] * 7)
    accepted = accepted_of(case, None, tokens=torch.empty(7, 0, dtype=torch.long))
    assert torch.equal(accepted.out_tokens, accepted_of(case, probs).out_tokens[:, :1])


def test_copied_tokens_are_one_hot_proposals():
    for seed in range(5):
        case, probs, requests = verification("sampled", 9, 5, 23, seed)
        copied = torch.rand(9, 5, generator=torch.Generator().manual_seed(seed)) < 0.5
        one_hot = torch.nn.functional.one_hot(case.drafts, 23).float()
        mixture = torch.where(copied[..., None], one_hot, probs)
        accepted = accepted_of(case, probs, copied=copied)
        for r in range(9):
            assert_outcome(accepted, r, literal_outcome(case, mixture, requests, r))
        assert torch.equal(accepted_of(case, None).out_tokens, accepted_of(case, one_hot).out_tokens)


class Rejecting(RoundKeys):
    """Keys that reject every draft."""

    def kept(self, draft_mass, target_mass):
        return torch.zeros_like(draft_mass, dtype=torch.bool)


def test_a_vanished_residual_falls_back_to_the_target():
    """p_t = p_d up to rounding: a rejection can only come from rounding, and must still yield a possible token."""
    probs = torch.tensor([0.25, 0.25, 0.5, 0.0])
    rows, keys = batch_of([Request()], 1, 1)
    block = DraftBlock(torch.tensor([[2]]), distribution=written(probs.view(1, 1, 4)))
    windows, logits = Windows(torch.tensor([1]), torch.tensor([0, 2])), probs.log().expand(2, 4)
    accepted = accept.reference(block, windows, logits, keys.positions, rows, Rejecting(**vars(keys)))
    assert accepted.accept_lens.tolist() == [0]
    assert probs[accepted.bonus_tokens[0]] > 0


def test_the_accelerators_route_gives_the_same_outcome(monkeypatch):
    case, probs, _ = verification("mixed", 13, 5, 41, seed=5)
    expected = accepted_of(case, probs)
    monkeypatch.setattr(acceptance_reference, "reads_are_free", lambda _: False)
    assert torch.equal(accepted_of(case, probs).out_tokens, expected.out_tokens)
