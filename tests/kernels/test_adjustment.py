"""Penalties, minimum lengths and biases: every row against a literal loop over one request's tokens."""

import random

import pytest
import torch
from dspark_kernels import (
    Adjustment,
    AdjustmentTable,
    DraftBlock,
    RoundKeys,
    SamplingBatch,
    Windows,
    accept_ref,
    adjust,
    adjust_ref,
)
from literal import Request, literal_adjust, literal_distribution
from scipy import stats

RTOL = 2e-6  # float32 against float64; a logit passes four roundings


def some_adjustment(rng, vocab_size):
    kinds = [
        {"frequency": rng.uniform(-2, 2)},
        {"presence": rng.uniform(-2, 2)},
        {"repetition": rng.uniform(0.3, 2)},
        {"min_new_tokens": rng.randrange(1, 12), "stop_token_ids": rng.sample(range(vocab_size), 2)},
        {"logit_bias": {rng.randrange(vocab_size): rng.uniform(-50, 50) for _ in range(3)}},
    ]
    return Adjustment(
        **{name: value for kind in rng.sample(kinds, rng.randrange(1, 6)) for name, value in kind.items()}
    )


class Verification:
    """Requests with outputs of their own, windows of drafts that repeat tokens, and rows of padding."""

    def __init__(self, vocab_size, bs, seed, device="cpu"):
        rng = random.Random(seed)
        self.outputs = [[rng.randrange(vocab_size) for _ in range(rng.randrange(12))] for _ in range(bs)]
        self.adjustments = [some_adjustment(rng, vocab_size) if rng.random() < 0.7 else None for _ in range(bs)]
        # Few different tokens, so that drafts repeat each other and the output.
        self.windows = [[rng.choice([0, 1, vocab_size - 1]) for _ in range(rng.randrange(1, 6))] for _ in range(bs)]
        lens = torch.tensor([len(window) for window in self.windows])
        self.num_rows, padding = int(lens.sum()), 3
        indptr = torch.nn.functional.pad(lens.cumsum(0), (1, 0))
        row = torch.arange(self.num_rows)
        requests = torch.searchsorted(indptr, row, right=True) - 1
        columns = row - indptr[requests]
        tokens = torch.tensor([token for window in self.windows for token in window])
        # What padding of captured graphs looks like.
        requests = torch.cat([requests, torch.full((padding,), bs + 4)])
        columns = torch.cat([columns, torch.full((padding,), 9)])
        tokens = torch.cat([tokens, torch.zeros(padding, dtype=torch.int64)])
        self.layout = [part.to(device) for part in (requests, columns, tokens, indptr)]
        generator = torch.Generator().manual_seed(seed)
        self.logits = torch.randn(self.num_rows + padding, vocab_size, generator=generator) * 4
        self.table = AdjustmentTable.empty(1, vocab_size, device)
        slots, free = [], rng.sample(range(bs), bs)
        self.table = self.table.grown(bs)
        for adjustment, output in zip(self.adjustments, self.outputs, strict=True):
            slots.append(-1 if adjustment is None else free.pop())
            if adjustment is not None:
                self.table.set(slots[-1], some_adjustment(rng, vocab_size), [0, 0, 1])  # of an earlier request
                self.table.set(slots[-1], adjustment, output)
        self.slots = torch.tensor(slots, device=device)

    def expected(self):
        rows = iter(self.logits.tolist())
        adjusted = []
        for adjustment, output, window in zip(self.adjustments, self.outputs, self.windows, strict=True):
            for column in range(len(window)):
                row = next(rows)
                seen = output + window[1 : column + 1]
                adjusted.append(row if adjustment is None else literal_adjust(row, adjustment, seen))
        return torch.tensor([*adjusted, *rows], dtype=torch.float64)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("vocab_size", "bs"), [(7, 1), (50, 9), (2500, 3)])
@pytest.mark.parametrize("form", [adjust_ref, adjust])
def test_rows_equal_the_literal_loop(form, vocab_size, bs, seed, device):
    case = Verification(vocab_size, bs, seed, "cpu" if form is adjust_ref else device)
    logits = case.logits.clone().to(case.slots.device)
    form(logits, case.table, case.slots, *case.layout)
    torch.testing.assert_close(logits.cpu().double(), case.expected(), rtol=RTOL, atol=RTOL * 50)


def test_kernel_and_reference_agree_to_the_bit(device):
    case = Verification(300, 12, seed=77, device=device)
    given, wanted = (case.logits.clone().to(device) for _ in range(2))
    adjust(given, case.table, case.slots, *case.layout)
    adjust_ref(wanted, case.table, case.slots, *case.layout)
    assert torch.equal(given, wanted)
    untouched = [row for row, owner in enumerate(case.layout[0].tolist()) if owner >= 12 or case.slots[owner] < 0]
    assert len(untouched) > 3
    assert torch.equal(given[untouched].cpu(), case.logits[untouched])


@pytest.mark.parametrize("form", [adjust_ref, adjust])
def test_sixteen_bit_logits_are_adjusted_in_float32(form, device):
    case = Verification(64, 5, seed=5, device=device)
    case.logits = case.logits.bfloat16().float()
    logits = case.logits.bfloat16().to(device)
    form(logits, case.table, case.slots, *case.layout)
    # One rounding at the end; Triton's interpreter truncates.
    torch.testing.assert_close(logits.cpu().double(), case.expected(), rtol=2**-7, atol=0)


def test_output_that_was_counted_equals_output_that_was_given():
    case = Verification(40, 8, seed=3)
    fresh = AdjustmentTable.empty(len(case.table), 40, "cpu")
    for adjustment, slot in zip(case.adjustments, case.slots.tolist(), strict=True):
        if adjustment is not None:
            fresh.set(slot, adjustment, [])
    for first in range(0, 12, 4):  # steps that commit up to four tokens, some of them none
        tokens = torch.tensor([[*output[first : first + 4], -1, -1, -1, -1, -1][:5] for output in case.outputs])
        fresh.count(case.slots, tokens)
    assert torch.equal(fresh.counts, case.table.counts)
    assert torch.equal(fresh.num_outputs, case.table.num_outputs)


def test_distribution_of_sampled_text_under_penalties():
    """Rows adjusted along the drafts give the very distribution of decoding one token at a time.

    The target is one row of logits, so a text of three tokens has 4 ** 3 outcomes with known probabilities; the drafts
    are uniform, hence mostly wrong and often repeating.
    """
    vocab_size, gamma, trials = 4, 2, 40_000
    base = [0.3, -0.2, 0.9, 0.1]
    adjustment = Adjustment(
        frequency=0.6, presence=0.4, repetition=1.7, min_new_tokens=3, stop_token_ids=[3], logit_bias={1: 0.8}
    )
    output = [2, 0]
    table = AdjustmentTable.empty(1, vocab_size, "cpu")
    table.set(0, adjustment, output)
    window = gamma + 1
    drafts = torch.randint(vocab_size, (trials, gamma), generator=torch.Generator().manual_seed(1))
    tokens = torch.cat([torch.zeros(trials, 1, dtype=torch.int64), drafts], dim=1)
    row = torch.arange(trials * window)
    indptr = torch.arange(0, trials * window + 1, window)
    logits = torch.tensor(base).repeat(trials * window, 1)
    slots = torch.zeros(trials, dtype=torch.int64)
    adjust_ref(logits, table, slots, row // window, row % window, tokens.view(-1), indptr)
    neutral = [1.0] * trials, [-1] * trials, [1.0] * trials, [0.0] * trials, [None] * trials
    rows, keys = SamplingBatch.from_lists(*neutral), RoundKeys(9, 0, torch.arange(trials), torch.zeros(trials).long())
    proposal = torch.full((trials, gamma, vocab_size), 1 / vocab_size)
    block, windows = DraftBlock(drafts, proposal), Windows(torch.full((trials,), gamma), indptr)
    emitted = accept_ref(block, windows, logits, keys.positions, rows, keys).out_tokens

    def distribution(seen):
        return torch.tensor(
            literal_distribution(torch.tensor(literal_adjust(base, adjustment, seen)), Request()), dtype=torch.float64
        )

    first = torch.bincount(emitted[:, 0], minlength=vocab_size).double()
    expected = distribution(output)
    assert expected[3] == 0 and first[3] == 0  # ends the text, which is too short
    assert stats.chisquare(first[:3], expected[:3] * trials).pvalue > 1e-4
    for token in range(3):
        second = emitted[(emitted[:, 0] == token) & (emitted[:, 1] >= 0), 1]
        observed = torch.bincount(second, minlength=vocab_size).double()
        assert observed.sum() > 1000
        assert stats.chisquare(observed, distribution([*output, token]) * len(second)).pvalue > 1e-4
    third = emitted[(emitted[:, :2] == 2).all(-1) & (emitted[:, 2] >= 0), 2]
    observed = torch.bincount(third, minlength=vocab_size).double()
    assert observed.sum() > 300
    assert stats.chisquare(observed, distribution([*output, 2, 2]) * len(third)).pvalue > 1e-4
