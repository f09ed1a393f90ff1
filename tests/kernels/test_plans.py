"""Tests of planning a verification and of laying out a decode step, against one request at a time."""

from dataclasses import fields, replace

import pytest
import torch
from dspark_kernels import (
    PlanNumbers,
    PreparedStep,
    StepRequests,
    VerifyRows,
    plan_staged,
    plan_top,
    plan_uniform,
    prepare,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from target_distribution import pairwise

from sglang_dspark.step.selection import top_prefixes

SIZES = [(1, 1), (1, 16), (3, 5), (17, 1), (17, 16), (130, 5)]
FIELDS = [field.name for field in fields(VerifyRows)]


def step_requests(bs, depth, device, num_real=None):
    """Requests whose integers are narrow where there are 17 of them, as their drafts are."""
    generator, longest = torch.Generator().manual_seed(0), 40
    columns = [torch.randint(least, most, (bs,), generator=generator) for least, most in ((1, 50), (0, longest))]
    columns.append(torch.randperm(bs + 2, generator=generator)[:bs])
    table = torch.randint(1, 2**31 - 1, (bs + 2, longest + depth + 1), generator=generator)
    real = None if num_real is None else torch.tensor([num_real], device=device)
    narrow = torch.int32 if bs == 17 else torch.int64
    return StepRequests(*(column.to(device, narrow) for column in columns), table.to(device, torch.int32), real)


def survivals(bs, depth, device, levels=None, seed=0):
    """Running products; with `levels` so coarse that many are equal. Some rows are forced or barred in part."""
    generator = torch.Generator().manual_seed(seed)
    survival = torch.rand(bs, depth, generator=generator).cumprod(1)
    if levels:
        survival = (survival * levels).floor() / levels
    survival[::5, : depth // 2] = 2.0
    survival[2::7, depth // 3 :] = -1.0
    return survival.to(device)


def drafts_of(bs, depth, device):
    """Columns of wider rows."""
    wide = 1000 + torch.arange(bs * (depth + 3)).view(bs, depth + 3)
    return wide.to(device, torch.int32 if bs == 17 else torch.int64)[:, 1 : depth + 1]


def flattened(lens, drafts, requests, num_tokens, depth):
    """The rows that `lens` of the real requests stand for, one token after the other."""
    bs, table = len(requests), requests.req_to_token.tolist()
    columns = (requests.anchors, requests.prefix_lens, requests.req_pool_indices)
    step = list(zip(*(column.tolist() for column in columns), drafts.tolist(), strict=True))
    rows, indptr = [], [0]
    for request, length in enumerate(lens):
        anchor, prefix, pool_row, block = step[request]
        for column, token in enumerate([anchor, *block[:length]]):
            rows.append((request, column, token, prefix + column, table[pool_row][prefix + column]))
        indptr.append(len(rows))
    indptr += [len(rows)] * (bs - len(lens))
    rows += [(0, depth + 1, 0, 0, 0)] * (num_tokens - len(rows))
    padded_lens = [*lens, *[0] * (bs - len(lens))]
    int64 = [torch.tensor(values) for values in (padded_lens, indptr)]
    return VerifyRows(*int64, *torch.tensor(rows).unbind(1))


def assert_same(plan, expected):
    for name in FIELDS:
        ours, theirs = getattr(plan, name), getattr(expected, name)
        assert ours.dtype == theirs.dtype and torch.equal(ours.cpu(), theirs.cpu()), name


def check_top(survival, budget, requests, num_tokens, num_real):
    """Both forms against the selection of the scheduler, and with the order of the real requests only."""
    bs, depth = survival.shape
    drafts = drafts_of(bs, depth, survival.device)
    fitting = min(int(budget), num_tokens - num_real)
    lens = top_prefixes(survival[:num_real].cpu(), fitting).tolist()
    expected = flattened(lens, drafts, requests, num_tokens, depth)
    for form in (plan_top, plan_top.reference):
        assert_same(form(survival, budget, drafts, requests, num_tokens), expected)
        assert_same(form(survival[:num_real], budget, drafts, requests, num_tokens), expected)


@pytest.mark.parametrize(("bs", "depth"), SIZES)
@pytest.mark.parametrize("levels", [None, 4])
def test_top_admits_the_same_drafts_as_the_scheduler(bs, depth, levels, device):
    survival = survivals(bs, depth, device, levels)
    for budget in {0, 1, bs * depth // 3, bs * depth}:
        check_top(survival, budget, step_requests(bs, depth, device), bs + budget + 5, bs)


def padded_slots(rows, spare):
    """The same plan in buffers of ``spare`` more request slots, which have no rows."""
    lens, indptr = (torch.nn.functional.pad(rows.verify_lens, (0, spare)), rows.indptr.tolist())
    return replace(rows, verify_lens=lens, indptr=torch.tensor(indptr + indptr[-1:] * spare))


@pytest.mark.parametrize(("bs", "depth"), [(1, 1), (3, 5), (17, 5), (130, 16)])
@pytest.mark.parametrize("spare", [0, 1, 300])
def test_a_staged_plan_does_what_its_numbers_say(bs, depth, spare, device):
    """Lengths by rank, by rank after one request, or equal for all, as the scheduler selects, and as is launched.

    A draft ranks by its survival times the weight of its request, to the bit.
    """
    num_real = max(1, bs - 2)
    requests, drafts = step_requests(bs, depth, device, num_real), drafts_of(bs, depth, device)
    survival, num_tokens = survivals(bs, depth, device, 4), bs * (depth + 1) + 3
    even = torch.ones(bs, device=device)
    weights = 1 / (1 + torch.arange(bs, device=device) % 3)
    ranked = survival[:num_real].cpu()
    apart = survivals(bs, depth, device)
    by_weight, few = (apart * weights[:, None])[:num_real].cpu(), num_real * depth // 4
    behind = ranked.clone()
    behind[num_real - 1] = 2.0
    budget = num_real * depth // 2
    plans = [
        (survival, even, (budget, -1, -1), top_prefixes(ranked, budget).tolist()),
        (apart, weights, (few, -1, -1), top_prefixes(by_weight, few).tolist()),
        (survival, even, (0, -1, -1), [0] * num_real),
        (survival, even, (budget, -1, num_real - 1), top_prefixes(behind, budget).tolist()),
        (survival, weights, (0, depth, -1), [depth] * num_real),
        (survival, weights, (0, depth // 2, -1), [depth // 2] * num_real),
    ]
    for predicted, used, numbers, lens in plans:
        expected = padded_slots(flattened(lens, drafts, requests, num_tokens, depth), spare)
        for form in (plan_staged, plan_staged.reference):
            out = VerifyRows.empty(bs + spare, num_tokens, device)
            given = torch.tensor(numbers, device=device)
            assert form(predicted, used, given, drafts, requests, out) is out
            assert_same(out, expected)


def test_the_largest_batch_and_one_that_is_left_to_torch(device):
    for bs, depth, budget in ((512, 16, 3000), (520, 16, 3000)):
        requests, survival = step_requests(bs, depth, device), survivals(bs, depth, device, 8)
        check_top(survival, budget, requests, 4096, bs)
        out, drafts = VerifyRows.empty(bs, 4096, device), drafts_of(bs, depth, device)
        weights = torch.linspace(0.2, 1, bs, device=device)
        plan_staged(survival, weights, torch.tensor([budget, -1, -1], device=device), drafts, requests, out)
        assert_same(out, plan_top.reference(survival * weights[:, None], budget, drafts, requests, 4096))


@pytest.mark.parametrize("num_real", [1, 12, 17])
def test_request_slots_without_a_request_have_no_rows(num_real, device):
    survival, requests = survivals(17, 5, device), step_requests(17, 5, device, num_real)
    survival[num_real:] = 3.0
    check_top(survival, 20, requests, 64, num_real)
    check_uniform(3, drafts_of(17, 5, device), requests, 80, num_real, 3)


def test_no_more_drafts_are_admitted_than_the_tier_holds(device):
    survival, requests = survivals(17, 5, device), step_requests(17, 5, device)
    check_top(survival, 60, requests, 40, 17)
    check_top(survival, 60, requests, 17, 17)


def test_signed_zeros_tie_and_infinities_come_first(device):
    survival = torch.tensor([[0.5, 0.0, -0.0], [torch.inf, 0.5, -0.0], [0.0, -0.0, 0.0], [1e-40, 1e-42, 0.0]])
    for budget in range(13):
        check_top(survival.to(device), budget, step_requests(4, 3, device), 20, 4)


def check_uniform(verify_len, drafts, requests, num_tokens, num_real, depth):
    expected = flattened([verify_len] * num_real, drafts, requests, num_tokens, depth)
    for form in (plan_uniform, plan_uniform.reference):
        assert_same(form(verify_len, drafts, requests, num_tokens), expected)


@pytest.mark.parametrize("bs", [1, 3, 130])
@pytest.mark.parametrize("verify_len", [0, 1, 5, 16])
def test_uniform_verifies_as_many_drafts_of_everyone(bs, verify_len, device):
    drafts = drafts_of(bs, 16 if verify_len else 0, device)
    requests = step_requests(bs, 16, device)
    for spare in (0, 7):
        check_uniform(verify_len, drafts, requests, bs * (verify_len + 1) + spare, bs, verify_len)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_small_plan(data):
    bs, depth = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    values = st.sampled_from([-1.0, 0.0, 0.25, 0.5, 1.0, 2.0])
    rows = data.draw(st.lists(st.lists(values, min_size=depth, max_size=depth), min_size=bs, max_size=bs))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    survival = torch.tensor([sorted(row, reverse=True) for row in rows], device=device)
    num_real = data.draw(st.integers(1, bs))
    budget = data.draw(st.integers(0, bs * depth + 2))
    num_tokens = data.draw(st.integers(bs, bs * (depth + 1) + 3))
    check_top(survival, budget, step_requests(bs, depth, device, num_real), num_tokens, num_real)


MASK = 77


@pytest.mark.parametrize(
    ("sizes", "gamma", "form"),
    pairwise([(1, 1), (3, 3), (3, 8), (17, 40), (130, 130)], [1, 5, 7, 16], [prepare, prepare.reference]),
)
def test_every_request_is_laid_out_and_slots_without_one_are_padded(sizes, gamma, form, device):
    bs, num_slots = sizes
    generator, spare = torch.Generator().manual_seed(0), num_slots - bs
    anchors, prefixes = (torch.randint(0, 60, (bs,), generator=generator) for _ in range(2))
    pool_rows = torch.randperm(bs + 4, generator=generator)[:bs]
    narrow = torch.int32 if bs == 3 else torch.int64
    columns = anchors.to(device), prefixes.to(device, narrow), pool_rows.to(device, narrow)
    requests = StepRequests(*columns, torch.zeros((bs + 4, 1), dtype=torch.int32, device=device))
    out = PreparedStep.empty(num_slots, gamma, device)
    for buffer in vars(out).values():
        buffer.fill_(-1)
    found = form(requests, gamma, MASK, out, PlanNumbers(9, -1, 2)) if spare else form(requests, gamma, MASK)
    assert (found is out) == (spare > 0) and len(found.requests(requests.req_to_token)) == num_slots
    padded = [torch.nn.functional.pad(column, (0, spare)) for column in (anchors, prefixes, pool_rows)]
    expected = PreparedStep(
        torch.tensor([[anchor] + [MASK] * (gamma - 1) for anchor in anchors.tolist()] + [[MASK] * gamma] * spare),
        torch.tensor([list(range(prefix, prefix + gamma)) for prefix in padded[1].tolist()]),
        *padded,
        torch.tensor([bs]),
        torch.tensor([9, -1, 2] if spare else [0, -1, -1]),
    )
    for name, values in vars(expected).items():
        assert getattr(found, name).dtype == values.dtype and torch.equal(getattr(found, name).cpu(), values), name
