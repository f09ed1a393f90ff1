"""Acceptance against the literal rules, one request at a time, on odd and ragged shapes."""

import itertools

import pytest
import torch
from dspark_kernels import DraftBlock, RoundKeys, Windows, accept_ref, draw
from dspark_kernels.acceptance import acceptance_reference
from literal import Request, batch_of, literal_accept

GREEDY = Request(temperature=0.0)
RULES = {
    "greedy": [GREEDY],
    "sampled": [Request(0.7, 5, 0.9), Request(1.0), Request(1.3, min_p=0.1)],
    "seeded": [Request(1.0, seed=3), Request(0.8, 4, 0.9, seed=-4)],
}
RULES["mixed"] = [rule for pair in itertools.zip_longest(*RULES.values()) for rule in pair if rule is not None]


def requests_of(kind, bs):
    rules = itertools.islice(itertools.cycle(RULES[kind]), bs)
    return [
        Request(r.temperature, r.top_k, r.top_p, r.min_p, r.seed, key=1000 + 7 * i, position=11 * i)
        for i, r in enumerate(rules)
    ]


class Case:
    """Random drafts and target rows; the target's row 0..verify_len of a request favours its drafts."""

    def __init__(self, kind, bs, gamma, vocab_size, seed, verify_lens=None):
        generator = torch.Generator().manual_seed(seed)
        self.requests = requests_of(kind, bs)
        self.rows, self.keys = batch_of(self.requests, seed=99, step=seed)
        self.draft_probs = (torch.randn(bs, gamma, vocab_size, generator=generator) * 2).softmax(-1)
        self.drafts = torch.multinomial(self.draft_probs.flatten(0, 1), 1, generator=generator).view(bs, gamma)
        lens = torch.randint(0, gamma + 1, (bs,), generator=generator) if verify_lens is None else verify_lens
        self.verify_lens = torch.as_tensor(lens)
        self.indptr = torch.nn.functional.pad((self.verify_lens + 1).cumsum(0), (1, 0))
        favoured = torch.cat([self.draft_probs, self.draft_probs[:, -1:]], dim=1).log()
        favoured[:, :gamma].scatter_add_(2, self.drafts[..., None], torch.full((bs, gamma, 1), 1.5))
        favoured += torch.randn(favoured.shape, generator=generator)
        self.target_rows = [favoured[r, : self.verify_lens[r] + 1] for r in range(bs)]
        self.logits = torch.cat(self.target_rows)

    def accept(self, **changes):
        values = {
            "draft_tokens": self.drafts,
            "verify_lens": self.verify_lens,
            "target_logits": self.logits,
            "indptr": self.indptr,
            "draft_probs": self.draft_probs,
            "copied": None,
        } | changes
        block = DraftBlock(values["draft_tokens"], values["draft_probs"], copied=values["copied"])
        windows = Windows(values["verify_lens"], values["indptr"])
        return accept_ref(block, windows, values["target_logits"], self.keys.positions, self.rows, self.keys)

    def literal(self, r, draft_probs=None):
        return literal_accept(
            self.drafts[r].tolist(),
            int(self.verify_lens[r]),
            self.target_rows[r],
            (self.draft_probs if draft_probs is None else draft_probs)[r].double().tolist(),
            self.requests[r],
            self.keys,
        )


def assert_outcome(accepted, r, expected):
    padding = [-1] * (accepted.out_tokens.shape[1] - len(expected))
    assert accepted.out_tokens[r].tolist() == expected + padding
    assert accepted.accept_lens[r] == len(expected) - 1
    assert accepted.bonus_tokens[r] == expected[-1]


@pytest.mark.parametrize(("bs", "gamma", "vocab_size"), [(1, 1, 2), (3, 4, 23), (13, 5, 41), (6, 7, 111)])
@pytest.mark.parametrize("kind", RULES)
def test_every_request_matches_the_literal_rule(kind, bs, gamma, vocab_size):
    for seed in range(6):
        case = Case(kind, bs, gamma, vocab_size, seed)
        accepted = case.accept()
        for r in range(bs):
            assert_outcome(accepted, r, case.literal(r))


@pytest.mark.parametrize("kind", RULES)
def test_the_cases_reach_every_outcome(kind):
    """The comparison above would be hollow without full acceptance, rejection at several depths and plain draws."""
    outcomes = set()
    for seed in range(6):
        case = Case(kind, 13, 5, 41, seed)
        outcomes |= set(zip(case.verify_lens.tolist(), case.accept().accept_lens.tolist(), strict=True))
    assert (0, 0) in outcomes
    assert any(verified == kept > 1 for verified, kept in outcomes)
    assert len({kept for verified, kept in outcomes if kept < verified}) >= 3


# Rows of a captured tier past the last request hold what lay in their memory.
@pytest.mark.parametrize("padding", [50.0, float("nan")])
@pytest.mark.parametrize("kind", RULES)
def test_padding_rows_and_fillers_change_nothing(kind, padding):
    case = Case(kind, 7, 4, 23, seed=1)
    expected = case.accept()
    slots = torch.arange(4)
    drafts = case.drafts.masked_fill(slots >= case.verify_lens[:, None], -1)
    poison = case.draft_probs.masked_fill((slots >= case.verify_lens[:, None])[..., None], torch.nan)
    padded = torch.cat([case.logits, torch.full((9, 23), padding)])
    accepted = case.accept(draft_tokens=drafts, target_logits=padded, draft_probs=poison)
    assert torch.equal(accepted.out_tokens, expected.out_tokens)


def test_a_block_without_drafts_is_a_plain_step():
    case = Case("mixed", 7, 5, 41, seed=4, verify_lens=[0] * 7)
    nothing = torch.empty(7, 0, dtype=torch.long)
    for draft_probs in (None, torch.empty(7, 0, 41)):
        accepted = case.accept(draft_tokens=nothing, draft_probs=draft_probs)
        assert torch.equal(accepted.out_tokens, case.accept().out_tokens[:, :1])
    assert torch.equal(accepted.bonus_tokens, draw(case.logits, case.rows, case.keys))


def test_copied_tokens_are_one_hot_proposals():
    for seed in range(5):
        case = Case("sampled", 9, 5, 23, seed)
        copied = torch.rand(9, 5, generator=torch.Generator().manual_seed(seed)) < 0.5
        one_hot = torch.nn.functional.one_hot(case.drafts, 23).float()
        mixture = torch.where(copied[..., None], one_hot, case.draft_probs)
        accepted = case.accept(copied=copied)
        for r in range(9):
            assert_outcome(accepted, r, case.literal(r, mixture))
        assert torch.equal(case.accept(draft_probs=None).out_tokens, case.accept(draft_probs=one_hot).out_tokens)


def test_a_vanished_residual_falls_back_to_the_target(monkeypatch):
    """p_t = p_d up to rounding: a rejection can only come from rounding, and must still yield a possible token."""
    probs = torch.tensor([0.25, 0.25, 0.5, 0.0])
    rows, keys = batch_of([Request()], 1, 1)
    monkeypatch.setattr(RoundKeys, "block_uniform", lambda *_: torch.ones(1, 1, dtype=torch.float64))
    block, windows = (
        DraftBlock(torch.tensor([[2]]), probs.view(1, 1, 4)),
        Windows(torch.tensor([1]), torch.tensor([0, 2])),
    )
    accepted = accept_ref(block, windows, probs.log().expand(2, 4), keys.positions, rows, keys)
    assert accepted.accept_lens.tolist() == [0]
    assert probs[accepted.bonus_tokens[0]] > 0


def test_the_accelerators_route_gives_the_same_outcome(monkeypatch):
    case = Case("mixed", 13, 5, 41, seed=5)
    expected = case.accept()
    monkeypatch.setattr(acceptance_reference, "reads_are_free", lambda _: False)
    assert torch.equal(case.accept().out_tokens, expected.out_tokens)


def test_another_vocabulary_is_refused():
    case = Case("sampled", 3, 4, 23, seed=0)
    with pytest.raises(ValueError, match=r"\(3, 4, 22\).*\(3, 4, 23\)"):
        case.accept(draft_probs=case.draft_probs[..., :22])
