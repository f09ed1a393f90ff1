"""Candidates in the walk: both forms, slot by slot, and what is stored is what was drawn from."""

from dataclasses import replace

import pytest
import torch
from dspark_kernels import Candidates, block_confidence, draft_block, draft_block_ref
from dspark_kernels.drafting.heads import OUTRIGHT
from literal import Request
from pairwise import pairwise
from walk_case import GREEDY, MIXED, WalkCase

BS, GAMMA, V = 6, 4, 150
PROPOSED = range(1, V, 3)
TOL = {"atol": 2e-5, "rtol": 2e-5}
SEEDED = tuple(replace(rule, seed=seed) for rule, seed in zip(MIXED * 2, (None, 7) * 3, strict=True))
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
    pairwise(["vanilla", "rnn", "selector", None], [False, True], [GREEDY, MIXED, SEEDED]),
)
def test_kernels_draft_what_the_reference_drafts(device, head_type, reduced, rules):
    case = Case(device, rules, head_type=head_type, reduced=reduced)
    found, expected = case.walk(draft_block, case.chains), case.walk(draft_block_ref, case.chains)
    assert torch.equal(found.tokens, expected.tokens) and torch.equal(found.chains, expected.chains)
    torch.testing.assert_close(found.confidence_logits, expected.confidence_logits, **TOL)
    followed = (found.tokens == case.chains[:, 2:-1]).long().cumprod(1).sum(1)
    assert found.chains[:, 1].tolist() == followed.tolist()
    assert followed.tolist()[0] == 1 and 2 in followed.tolist() and GAMMA in followed.tolist()
    sampled = case.rows.sampled_index
    if found.distribution is not None:
        torch.testing.assert_close(found.distribution.probs()[sampled], expected.distribution.probs()[sampled], **TOL)


def test_a_boost_multiplies_the_odds_of_the_candidate_while_its_chain_is_alive(device):
    """Boosts are nats at the request's temperature; behind the first other draft the drafter's distribution holds."""
    case = Case(device, [Request(0.7)], head_type=None)
    for form in (draft_block, draft_block_ref):
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
    for form in (draft_block, draft_block_ref):
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
    for form in (draft_block, draft_block_ref):
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
    for form in (draft_block, draft_block_ref):
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
