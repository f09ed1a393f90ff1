"""Penalties, minimum lengths and biases: every row against a literal loop over one request's tokens."""

import random

import pytest
import torch
from dspark_kernels import Adjustment, AdjustmentTable, adjust, adjust_ref
from literal import literal_adjust

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("vocab_size", "bs", "seed"), [(7, 1, 0), (7, 1, 1), (50, 9, 0), (300, 12, 77), (2500, 3, 1)])
def test_rows_equal_the_literal_loop(vocab_size, bs, seed, dtype, device):
    """Both forms agree to the bit, and leave other rows alone. Narrow logits are rounded once."""
    case = Verification(vocab_size, bs, seed, device)
    case.logits = case.logits.to(dtype).float()
    found = [case.logits.to(device, dtype, copy=True) for _ in range(2)]
    for form, logits in zip((adjust, adjust_ref), found, strict=True):
        form(logits, case.table, case.slots, *case.layout)
    narrow = {"rtol": 2**-7, "atol": 0}  # Triton's interpreter truncates
    tolerance = {"rtol": RTOL, "atol": RTOL * 50} if dtype == torch.float32 else narrow
    for logits in found:
        torch.testing.assert_close(logits.cpu().double(), case.expected(), **tolerance)
    if dtype == torch.float32:
        assert torch.equal(*found)
    untouched = [row for row, owner in enumerate(case.layout[0].tolist()) if owner >= bs or case.slots[owner] < 0]
    assert len(untouched) >= 3
    assert torch.equal(found[0][untouched].float().cpu(), case.logits[untouched])


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
