"""The draft walk against a literal loop over one request at a time, with the real heads."""

import pytest
import torch
from draft_heads import as_weights, draft_heads
from dspark_kernels import DraftHeads, MarkovWeights, Purpose, draft_block_ref, target_probs
from literal import Request, batch_of, literal_distribution, literal_draw, literal_uniform
from reference_decoding import markov_step

VOCAB, HIDDEN = 37, 6
RULES = {
    "greedy": [Request(temperature=0.0)],
    "sampled": [Request(0.7, 5, 0.9), Request(1.0), Request(1.3, min_p=0.1)],
    "seeded": [Request(1.0, seed=3), Request(0.8, 4, 0.9, seed=-4)],
}
RULES["mixed"] = [rule for group in RULES.values() for rule in group]


class Case:
    def __init__(self, kind, bs, gamma, head_type, dtype=torch.float32, confidence_with_markov=True):
        generator = torch.Generator().manual_seed(bs * 100 + gamma)
        rules = [RULES[kind][i % len(RULES[kind])] for i in range(bs)]
        self.requests = [
            Request(r.temperature, r.top_k, r.top_p, r.min_p, r.seed, key=31 * i, position=5 * i)
            for i, r in enumerate(rules)
        ]
        self.rows, self.keys = batch_of(self.requests, seed=12, step=34)
        self.base = (torch.randn(bs, gamma, VOCAB, generator=generator) * 2).to(dtype)
        self.hidden = torch.randn(bs, gamma, HIDDEN, generator=generator).to(dtype)
        self.anchors = torch.randint(VOCAB, (bs,), generator=generator)
        heads = draft_heads(
            head_type,
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            block_size=gamma,
            confidence_with_markov=confidence_with_markov,
        )
        self.markov, self.confidence = (head if head is None else head.to(dtype) for head in heads)

    def sample(self, **changes):
        values = {
            "base_logits": self.base,
            "hidden": self.hidden,
            "anchors": self.anchors,
            "heads": as_weights(self.markov, self.confidence),
            "rows": self.rows,
            "keys": self.keys,
        }
        return draft_block_ref(**(values | changes))

    def literal(self, r):
        """Tokens, corrected logits and confidence logits of request r."""
        request, previous = self.requests[r], self.anchors[r : r + 1]
        state = self.markov.initial_state(1, torch.device("cpu"), self.hidden.dtype) if self.markov else None
        tokens, corrected, confidences = [], [], []
        for k in range(self.base.shape[1]):
            hidden = self.hidden[r : r + 1, k]
            logits, embedding = self.base[r, k].float(), None
            if self.markov:
                bias, embedding, state = markov_step(self.markov, previous, hidden, state)
                logits = logits + bias[0].float()
            confidences.append(self.confidence(hidden, embedding).item())
            tokens.append(literal_draw(logits, request, literal_uniform(self.keys, request, k, Purpose.DRAFT), k))
            corrected.append(logits)
            previous = torch.tensor(tokens[-1:])
        return tokens, torch.stack(corrected), confidences


@pytest.mark.parametrize(("bs", "gamma"), [(1, 1), (3, 5), (7, 7)])
@pytest.mark.parametrize("head_type", ["vanilla", "gated", "rnn", None])
@pytest.mark.parametrize("kind", RULES)
def test_the_walk_matches_the_literal_loop(kind, head_type, bs, gamma):
    case = Case(kind, bs, gamma, head_type, confidence_with_markov=head_type is not None)
    block = case.sample()
    for r in range(bs):
        tokens, _, confidences = case.literal(r)
        assert block.tokens[r].tolist() == tokens
        torch.testing.assert_close(block.confidence_logits[r], torch.tensor(confidences))


@pytest.mark.parametrize("head_type", ["vanilla", "rnn", None])
def test_probs_are_the_distribution_of_the_corrected_logits(head_type):
    case = Case("mixed", 13, 5, head_type, confidence_with_markov=head_type is not None)
    block = case.sample()
    for r, request in enumerate(case.requests):
        if request.greedy or request.seed is not None:
            continue
        _, corrected, _ = case.literal(r)
        for k in range(5):
            torch.testing.assert_close(block.probs[r, k], torch.tensor(literal_distribution(corrected[k], request)))
            assert block.probs[r, k, block.tokens[r, k]] > 0


def test_the_stored_distribution_is_bitwise_the_drawn_one(monkeypatch):
    """Verification divides by the numbers the draw used, not by a recomputation of them."""
    drawn = []

    def spy(logits, params):
        drawn.append(target_probs(logits, params))
        return drawn[-1]

    monkeypatch.setattr("dspark_kernels.sampling.token_draw.target_probs", spy)
    block = Case("sampled", 5, 4, "vanilla", torch.bfloat16).sample()
    assert torch.equal(block.probs, torch.stack(drawn, dim=1))


@pytest.mark.parametrize(
    ("kind", "has_probs"), [("greedy", False), ("seeded", False), ("sampled", True), ("mixed", True)]
)
def test_probs_exist_only_for_sampled_requests(kind, has_probs):
    assert (Case(kind, 7, 3, "vanilla").sample().probs is not None) == has_probs


def test_no_confidence_head_gives_no_confidence():
    case = Case("greedy", 2, 3, "vanilla")
    assert case.sample(heads=as_weights(case.markov, None)).confidence_logits is None
    assert case.sample(with_confidence=False).confidence_logits is None


def test_bfloat16_heads_are_corrected_in_float32():
    """A bfloat16 sum would round the bias away: 256 + 0.5 is 256 in bfloat16."""
    w1, w2 = torch.ones(VOCAB, 1, dtype=torch.bfloat16), torch.tensor([[0.0], [0.5], [0.25]], dtype=torch.bfloat16)
    case = Case("greedy", 1, 1, "vanilla")
    base = torch.full((1, 1, 3), 256.0, dtype=torch.bfloat16)
    assert case.sample(base_logits=base, heads=DraftHeads(MarkovWeights(w1, w2, None))).tokens.tolist() == [[1]]
