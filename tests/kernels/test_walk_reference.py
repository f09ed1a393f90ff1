"""The draft walk against a literal loop over one request at a time, with the real heads."""

from dataclasses import replace

import pytest
import torch
from dspark_kernels import DraftHeads, MarkovWeights, Purpose, draft_block_ref, target_probs
from literal import Request, literal_distribution, literal_draw, literal_uniform
from reference_decoding import markov_step
from walk_case import WalkCase

VOCAB = 37
RULES = {
    "greedy": [Request(temperature=0.0)],
    "sampled": [Request(0.7, 5, 0.9), Request(1.0), Request(1.3, min_p=0.1)],
    "seeded": [Request(1.0, seed=3), Request(0.8, 4, 0.9, seed=-4)],
}
RULES["mixed"] = [rule for group in RULES.values() for rule in group]


def made(kind, bs, gamma, head_type="vanilla", **options):
    return WalkCase("cpu", RULES[kind], bs=bs, gamma=gamma, v=VOCAB, head_type=head_type, **options)


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
        tokens.append(literal_draw(logits, request, literal_uniform(case.keys, request, k, Purpose.DRAFT), k))
        corrected.append(logits)
        previous = torch.tensor(tokens[-1:])
    return tokens, torch.stack(corrected), confidences


@pytest.mark.parametrize(("bs", "gamma"), [(1, 1), (3, 5), (7, 7)])
@pytest.mark.parametrize("head_type", ["vanilla", "gated", "rnn", None])
@pytest.mark.parametrize("kind", RULES)
def test_the_walk_matches_the_literal_loop(kind, head_type, bs, gamma):
    case = made(kind, bs, gamma, head_type)
    block = case.run(draft_block_ref)
    for r in range(bs):
        tokens, corrected, confidences = literal(case, r)
        assert block.tokens[r].tolist() == tokens
        torch.testing.assert_close(block.confidence_logits[r], torch.tensor(confidences))
        request = case.requests[r]
        if not request.greedy and request.seed is None:
            expected = [literal_distribution(logits, request) for logits in corrected]
            torch.testing.assert_close(block.probs[r], torch.tensor(expected))
    assert (block.probs is not None) == any(not r.greedy and r.seed is None for r in case.requests)


def test_the_stored_distribution_is_bitwise_the_drawn_one(monkeypatch):
    """Verification divides by the numbers the draw used, not by a recomputation of them."""
    drawn = []

    def spy(logits, params):
        drawn.append(target_probs(logits, params))
        return drawn[-1]

    monkeypatch.setattr("dspark_kernels.sampling.token_draw.target_probs", spy)
    block = made("sampled", 5, 4, dtype=torch.bfloat16).run(draft_block_ref)
    assert torch.equal(block.probs, torch.stack(drawn, dim=1))


def test_no_confidence_head_gives_no_confidence():
    case = made("greedy", 2, 3)
    assert case.run(draft_block_ref, heads=replace(case.heads, confidence=None)).confidence_logits is None
    assert case.run(draft_block_ref, with_confidence=False).confidence_logits is None


def test_bfloat16_heads_are_corrected_in_float32():
    """A bfloat16 sum would round the bias away: 256 + 0.5 is 256 in bfloat16."""
    w1, w2 = torch.ones(VOCAB, 1, dtype=torch.bfloat16), torch.tensor([[0.0], [0.5], [0.25]], dtype=torch.bfloat16)
    case = made("greedy", 1, 1)
    case.base = torch.full((1, 1, 3), 256.0, dtype=torch.bfloat16)
    assert case.run(draft_block_ref, heads=DraftHeads(MarkovWeights(w1, w2, None))).tokens.tolist() == [[1]]
