"""Tests of the walk of drafts, by kernels and in torch, with and without candidates."""

from dataclasses import replace

import pytest
import torch
from acceptance_cases import GREEDY, MIXED, WalkCase
from dspark_kernels import (
    Candidates,
    DraftBlock,
    DraftVocabulary,
    RoundKeys,
    Windows,
    accept,
    block_confidence,
    draft_block,
)
from dspark_kernels.drafting import walk
from dspark_kernels.drafting.heads import OUTRIGHT
from literal import Request
from target_distribution import pairwise

# Triton's interpreter multiplies the bit patterns of bfloat16, whose rounding would decide draws.
HALF = torch.float16
# Both sides sum rank and v products in float32, in different orders; the reference rounds biases to the weights' dtype.
TOLERANCES = {torch.float32: {"atol": 2e-5, "rtol": 2e-5}, HALF: {"atol": 5e-3, "rtol": 5e-3}}


def check(case):
    """Compare the kernels' walk with the reference; return the block."""
    found, expected, rows = case.run(draft_block), case.run(draft_block.reference), case.rows
    tolerance = TOLERANCES[case.base.dtype]
    assert torch.equal(found.tokens, expected.tokens)
    torch.testing.assert_close(found.confidence_logits, expected.confidence_logits, **tolerance)
    assert (found.distribution is None) == (expected.distribution is None) == (not rows.any_sampled)
    if found.distribution is not None:
        of_both = [
            [part[rows.sampled_index] for part in (d.scores, d.log_norms, d.probs())]
            for d in (found.distribution, expected.distribution)
        ]
        torch.testing.assert_close(*of_both, **tolerance)
    return found


OTHER = DraftVocabulary(torch.arange(3), 150)


SEEDED = tuple(replace(rule, seed=seed) for rule, seed in zip(MIXED, (None, 2**62 + 5, -3), strict=True))
THIRD = range(1, 150, 3)


@pytest.mark.parametrize(
    ("head_type", "dtype", "rules", "token_ids", "eight_bits"),
    pairwise(
        ["vanilla", "gated", "rnn", "selector", None],
        [torch.float32, HALF],
        [GREEDY, MIXED, SEEDED],
        [None, THIRD],
        [False, True],
    ),
)
def test_every_walk(device, head_type, dtype, rules, token_ids, eight_bits):
    given = {"head_type": head_type, "dtype": dtype, "token_ids": token_ids, "eight_bits": eight_bits}
    case = WalkCase(device, rules, bs=6, gamma=4, **given)
    block = check(case)
    assert token_ids is None or (block.tokens % 3 == 1).all()


@pytest.mark.parametrize(
    ("bs", "gamma", "v", "rank", "dtype", "head_type"),
    [
        (1, 1, 7, 1, torch.float32, "vanilla"),
        (1, 7, 64, 16, HALF, "vanilla"),
        (3, 2, 193, 40, torch.float32, "vanilla"),
        (17, 2, 129, 5, HALF, "vanilla"),
        (17, 1, 300, 256, torch.float32, "vanilla"),
        (2, 2, 333, 256, HALF, "vanilla"),
        (70, 1, 97, 5, torch.float16, "vanilla"),
        (1, 1, 3, 1, torch.float32, "selector"),  # fewer tokens than may compete
        (1, 7, 64, 16, HALF, "selector"),
        (17, 2, 129, 300, torch.float32, "selector"),
    ],
)
@pytest.mark.parametrize("eight_bits", [False, True])
def test_odd_sizes(device, bs, gamma, v, rank, dtype, head_type, eight_bits):
    given = {"dtype": dtype, "head_type": head_type, "eight_bits": eight_bits}
    check(WalkCase(device, MIXED, bs=bs, gamma=gamma, v=v, rank=rank, **given))


@pytest.mark.parametrize("finish_tile", [16, 64])
def test_many_programs_are_merged_in_rounds(device, monkeypatch, finish_tile):
    """Ten programs' results, of which a merge takes one or four at a time."""
    monkeypatch.setattr(walk, "_FINISH_TILE", finish_tile)
    monkeypatch.setattr(walk, "num_processors", lambda device: 5)
    check(WalkCase(device, MIXED, bs=3, v=700))


@pytest.mark.parametrize("temperature", [1e-3, 1e-5, 1e-6])
def test_the_coldest_drafts_are_drawn_from_the_distribution_that_is_stored(device, temperature):
    """Scores of 2e7 would have left a tie of two tokens with the probability 1 each."""
    case = WalkCase(device, [Request(temperature)], bs=2, gamma=1, v=70, head_type=None)
    case.base.zero_()
    case.base[:, :, [3, 9]] = 20.0
    probs = case.run(draft_block).distribution.probs()
    torch.testing.assert_close(probs[..., [3, 9]], torch.full_like(probs[..., :2], 0.5), atol=1e-3, rtol=0)


@pytest.mark.parametrize("room", [100_000, 200_000])
def test_scores_are_rounded_before_they_are_summed(room):
    """On a GPU the compiler would subtract from the product before it is rounded, and what is stored is rounded."""
    *_, constants = walk._division(torch.zeros(1, 1, 16), None, room)
    assert constants["enable_fp_fusion"] is False


def test_ties_go_to_the_lowest_column(device):
    case = WalkCase(device, GREEDY, bs=4, gamma=1, v=300, head_type=None)
    case.base.zero_()
    for row, columns in enumerate([(299, 130), (64, 65, 200), (191, 63)]):
        case.base[row, 0, list(columns)] = 1.0
    assert case.run(draft_block).tokens.flatten().tolist() == [130, 64, 63, 0]


def test_nan_and_infinite_logits_never_give_an_id_outside_the_vocabulary(device):
    case = WalkCase(device, [Request(0.0), Request(1.0)], bs=4, gamma=2, v=70, head_type=None)
    case.base[0] = float("nan")
    case.base[1] = float("nan")
    case.base[2] = float("-inf")
    case.base[3] = float("-inf")
    case.base[3, :, 69] = 1.0
    tokens = case.run(draft_block).tokens
    assert tokens[:3].tolist() == [[0, 0]] * 3
    assert tokens[3].tolist() == [69, 69]


@pytest.mark.parametrize("any_sampled", [True, False])
def test_seeded_requests_draw_with_their_own_noise(device, any_sampled):
    seeds = [None, 2**62 + 5, None if any_sampled else 9, None, None if any_sampled else 17, -3]
    rules = [Request(r.temperature, seed=seed) for r, seed in zip(MIXED * 2, seeds, strict=True)]
    case = WalkCase(device, rules, bs=6)
    assert case.rows.any_sampled == any_sampled
    block = check(case)
    case.follow([replace(r, seed=None if r.seed is None else r.seed + 1) for r in rules])
    other = case.run(draft_block)
    assert torch.equal((other.tokens != block.tokens).any(1), case.rows.is_seeded)


def test_a_seeded_draft_is_the_token_that_the_same_logits_draw(device):
    """If drafts agree with the target in all but the noise, seeded requests accept everything."""
    rules = [Request(0.9, seed=seed) for seed in (3, 1, 4, 1, 5)]
    case = WalkCase(device, rules, bs=5, gamma=2, v=41, head_type=None)
    block = case.run(draft_block)
    assert block.distribution is None
    for slot in range(2):
        keys = RoundKeys(0, 0, case.keys.request_keys, case.keys.positions + slot)
        windows = Windows(torch.zeros_like(keys.positions), torch.arange(6, device=device))
        drawn = accept(
            DraftBlock.empty(5, device), windows, case.base[:, slot].contiguous(), keys.positions, case.rows, keys
        )
        assert torch.equal(block.tokens[:, slot], drawn.bonus_tokens)


def test_spreading_a_block_keeps_its_distribution(device):
    block = WalkCase(device, [Request(0.8)], bs=2, token_ids=[1, 5, 44]).run(draft_block)
    spread = block.spread(torch.tensor([3, 0], device=device), 4)
    assert torch.equal(spread.tokens[[3, 0]], block.tokens)
    assert torch.equal(spread.distribution.probs()[[3, 0]], block.distribution.probs())
    assert spread.distribution.probs().isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda case: setattr(case, "base", case.base.transpose(1, 2)), "must be contiguous"),
        (lambda case: setattr(case, "base", case.base[..., :-1].contiguous()), "same checkpoint"),
        (lambda case: setattr(case, "heads", replace(case.heads, vocabulary=OTHER)), "ProposalHeads"),
    ],
)
def test_parts_that_do_not_fit_are_refused(device, change, message):
    case = WalkCase(device)
    change(case)
    with pytest.raises(ValueError, match=message):
        case.run(draft_block)


def test_the_confidence_of_a_selector_does_not_depend_on_the_draft_itself(device):
    """Otherwise drafts that look good would be verified more often, and the text would be biased towards them."""
    case = WalkCase(device, [Request(1.3)], bs=6, gamma=4, head_type="selector")
    for form in (draft_block, draft_block.reference):
        block = case.run(form)
        other = case.run(form, keys=replace(case.keys, step=case.keys.step + 1))
        differ = block.tokens != other.tokens
        # The first draft that differs included.
        same = torch.cat((torch.zeros_like(differ[:, :1]), differ[:, :-1]), 1).cumsum(1) == 0
        assert torch.equal(block.confidence_logits[same], other.confidence_logits[same])
        assert (differ & same)[:, :3].any() and (block.confidence_logits != other.confidence_logits)[~same].any()


BS, GAMMA, V = 6, 4, 150
PROPOSED = range(1, V, 3)
TOL = {"atol": 2e-5, "rtol": 2e-5}
SEEDED_WALKS = tuple(replace(rule, seed=seed) for rule, seed in zip(MIXED * 2, (None, 7) * 3, strict=True))
LEVELS = (0.0, 1.5, 40.0)  # boosts of nothing, of something and of all there is, by matched tokens


class Case(WalkCase):
    """Chains in which the drafter's own tokens occur."""

    def __init__(self, device, rules=MIXED, *, head_type="vanilla", reduced=False):
        sizes = {"bs": BS, "gamma": GAMMA, "v": V}
        super().__init__(device, rules, **sizes, head_type=head_type, token_ids=PROPOSED if reduced else None)
        self.weights = torch.zeros(2, len(LEVELS) + 1, GAMMA, device=device)
        self.weights[0, 1:] = torch.tensor(LEVELS, device=device)[:, None]
        self.weights[1] = torch.tensor([-torch.inf, -9.0, 0.3, 9.0], device=device)[:, None]
        own = self.walk(draft_block, None).tokens
        other = torch.randint(V, (BS, GAMMA + 1), generator=torch.Generator().manual_seed(5)).to(device)
        other[:, :2] = own[:, :2]  # the chain dies in its third place, or is drawn there
        other[0, 1] = -1
        matched = torch.tensor([3, 1, 2, 3, 2, 0], device=device)
        self.chains = torch.cat([torch.stack([matched, torch.zeros_like(matched)], 1), other], 1)

    def walk(self, form, chains):
        return self.run(form, candidates=None if chains is None else Candidates(chains.clone(), self.weights))


@pytest.mark.parametrize(
    ("head_type", "reduced", "rules"),
    pairwise(["vanilla", "rnn", "selector", None], [False, True], [GREEDY, MIXED, SEEDED_WALKS]),
)
def test_kernels_draft_what_the_reference_drafts(device, head_type, reduced, rules):
    case = Case(device, rules, head_type=head_type, reduced=reduced)
    found, expected = case.walk(draft_block, case.chains), case.walk(draft_block.reference, case.chains)
    assert torch.equal(found.tokens, expected.tokens) and torch.equal(found.chains, expected.chains)
    torch.testing.assert_close(found.confidence_logits, expected.confidence_logits, **TOL)
    followed = (found.tokens == case.chains[:, 2:-1]).long().cumprod(1).sum(1)
    assert found.chains[:, 1].tolist() == followed.tolist()
    assert followed.tolist()[0] == 1 and 2 in followed.tolist() and GAMMA in followed.tolist()
    sampled = case.rows.sampled_index
    if found.distribution is not None:
        torch.testing.assert_close(found.distribution.probs()[sampled], expected.distribution.probs()[sampled], **TOL)


def test_a_boost_multiplies_the_odds_of_the_candidate_while_its_chain_is_alive(device):
    """Boosts are nats at the request's temperature; after the first other draft the drafter's distribution holds."""
    case = Case(device, [Request(0.7)], head_type=None)
    for form in (draft_block, draft_block.reference):
        plain, found = case.walk(form, None), case.walk(form, case.chains)
        before, after = plain.distribution.probs(), found.distribution.probs()
        for request in range(BS):
            boosts = case.weights[0, case.chains[request, 0]]
            for slot in range(GAMMA):
                odds, token = before[request, slot].clone(), int(case.chains[request, 2 + slot])
                if found.chains[request, 1] >= slot and token >= 0:
                    odds[token] *= boosts[slot].exp()
                torch.testing.assert_close(after[request, slot], odds / odds.sum(), atol=1e-5, rtol=1e-4)


def test_a_candidate_that_cannot_be_drawn_is_copied_if_it_weighs_enough(device):
    """And judged as what it is: kept with the target's probability, whatever the scores say."""
    case = Case(device, [Request(0.8)], reduced=True)
    case.chains[:, 2:] = torch.arange(0, 3 * (GAMMA + 1), 3, device=device)  # none has a column
    for form in (draft_block, draft_block.reference):
        block = case.walk(form, case.chains)
        strong = case.weights[0, case.chains[:, 0], 0] >= OUTRIGHT
        assert block.copied.tolist() == [[bool(s)] * GAMMA for s in strong]
        assert torch.equal(block.tokens[strong], case.chains[strong, 2:-1])
        assert block.chains[:, 1].tolist() == [GAMMA * bool(s) for s in strong]
        assert block.first(2).copied.shape == block.first(2).chains[:, 2:-1].shape
        spread = block.spread(torch.tensor([7, 0, 1, 2, 3, 4], device=device), 8)
        assert torch.equal(spread.copied[7], block.copied[0]) and torch.equal(spread.chains[7], block.chains[0])


def test_a_live_chain_asks_for_confidence(device):
    case = Case(device, GREEDY)
    for form in (draft_block, draft_block.reference):
        block, plain = case.walk(form, case.chains), case.walk(form, None)
        own = block_confidence(case.hidden, case.anchors, block.tokens, case.heads.confidence, case.heads.w1)
        least = case.weights[1, case.chains[:, 0]]
        alive = torch.arange(GAMMA, device=device) <= block.chains[:, 1:2]
        torch.testing.assert_close(block.confidence_logits, torch.where(alive, torch.maximum(own, least), own), **TOL)
        assert plain.chains is None and (block.confidence_logits > own + 1e-3).any()


@pytest.mark.parametrize("reduced", [False, True])
def test_a_tail_is_copied_and_sure_where_the_block_followed_its_chain(device, reduced):
    case = Case(device, reduced=reduced)
    case.weights = torch.cat((case.weights, case.weights[..., -1:]), -1)
    for form in (draft_block, draft_block.reference):
        candidates = Candidates(case.chains.clone(), case.weights)
        walked = form(case.base, case.hidden, case.anchors, case.heads, case.rows, case.keys, candidates)
        alive, own = walked.chains[:, 1] == GAMMA, walked.distribution.probs()
        block = walked.with_tail(candidates, GAMMA + 1)
        assert torch.equal(block.tokens[:, GAMMA], case.chains[:, -1])
        least = case.weights[1, case.chains[:, 0], GAMMA].clamp_min(-30)
        assert block.confidence_logits[:, GAMMA].tolist() == least.masked_fill(~alive, -30).tolist()
        assert (
            block.chains[:, 1].tolist() == (walked.tokens == case.chains[:, 2:-1]).cumprod(1).sum(1).add(alive).tolist()
        )
        assert block.copied is walked.copied
        sampled = case.rows.sampled_index
        assert torch.equal(block.distribution.probs()[sampled], own[sampled])
        assert alive.any() and not alive.all()
