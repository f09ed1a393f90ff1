"""Tests of inputs at the ends of their range, that lie apart in memory, or that do not fit together.

Large pools need offsets of 64 bits, and values that change from step to step compile no kernel again.
"""

import math
import mmap

import forms
import pytest
import torch
from dspark_kernels import (
    Candidates,
    ConfidenceWeights,
    DraftBlock,
    DraftDistribution,
    DraftHeads,
    HeldRows,
    MarkovWeights,
    PagedWindows,
    PreparedStep,
    RoundKeys,
    SamplingBatch,
    StepRequests,
    VerifyRows,
    Windows,
    accept,
    add_norm,
    block_confidence,
    causal_conv_rows,
    commit_conv_windows,
    commit_gated_delta,
    distribution_loss,
    draft_block,
    gated_delta,
    hold_rows,
    kv_inject,
    plan_top,
    plan_uniform,
    prepare,
    qk_norm_rope,
    silu_mul,
    window_attention,
)
from dspark_kernels.drafting.walk_kernel import choose_kernel
from recurrent_rows import Rows, part, replayed

EPS = 1e-5


def test_a_sum_of_zeros_stays_zero_and_columns_may_lie_apart(device):
    generator = torch.Generator().manual_seed(0)
    hidden, update, weight = (torch.randn(*s, generator=generator).to(device) for s in ((6, 24), (6, 24), (24,)))
    for found in add_norm(hidden, -hidden, weight, EPS):
        assert (found == 0).all() and found.is_contiguous()
    apart = update.t().contiguous().t()
    for one, other in zip(add_norm(hidden, apart, weight, EPS), add_norm(hidden, update, weight, EPS), strict=True):
        assert torch.equal(one, other)


def test_heads_may_lie_apart(device):
    generator = torch.Generator().manual_seed(0)
    q, k, weight = (torch.randn(*s, generator=generator).to(device) for s in ((6, 4, 64), (6, 2, 64), (64,)))
    given = weight, weight, EPS, torch.ones(32, device=device), torch.arange(6, device=device)
    apart = q.transpose(1, 2).contiguous().transpose(1, 2)
    for found, expected in zip(qk_norm_rope(apart, k, *given), qk_norm_rope(q, k, *given), strict=True):
        assert torch.equal(found, expected) and found.is_contiguous()


def test_the_activation_at_the_ends_of_the_range(device):
    gate = torch.tensor([[-1e4, -100.0, -0.0, 100.0, 1e4]], device=device)
    out = silu_mul(torch.cat([gate, torch.ones_like(gate)], dim=1))
    assert out.tolist() == [[0.0, 0.0, 0.0, 100.0, 1e4]]


def test_losses_of_extreme_logits_are_finite_and_gradients_take_their_place(device):
    logits, target = (torch.zeros(2, 300, device=device) for _ in range(2))
    logits[0, 7], target[1, 3], logits[1, 9:] = 3e4, -3e4, float("-inf")  # those not on a selector's shortlist
    place, labels = logits.data_ptr(), torch.tensor([8, 3], device=device)
    weights = {"ce_weight": 0.1, "tv_weight": 0.9}
    ce, tv, grad = distribution_loss(logits, target, None, labels, torch.ones(2, device=device), **weights)
    assert all(torch.isfinite(t).all() for t in (ce, tv, grad)) and grad.data_ptr() == place
    assert float(ce[0]) == pytest.approx(-torch.log(torch.tensor(1e-30)).item(), rel=1e-4)
    assert grad[1, :9].any() and not grad[1, 9:].any()
    empty = distribution_loss(logits[:0], target[:0], None, labels[:0], torch.ones(0, device=device), **weights)
    assert [len(found) for found in empty] == [0, 0, 0]


Z, N = torch.zeros, lambda *shape: torch.zeros(shape, dtype=torch.int64)


def rotated(q=(3, 4, 24), k=(3, 2, 24), weight=24, positions=3):
    return qk_norm_rope(Z(q), Z(k), Z(weight), Z(24), EPS, Z(12), N(positions))


def injected(width=2 * 2 * 3 * 64, apart=False):
    pool = Z(2, 12, 3, 64)
    pools = (pool.transpose(1, 2).contiguous().transpose(1, 2) if apart else pool), pool
    return kv_inject(Z(3, width), Z(2, 64), EPS, Z(32), N(3), N(3), pools)


def held(rows=3, width=12):
    return hold_rows(Z(rows, width), N(rows), N(rows), HeldRows.empty(4, 12, torch.float32, "cpu"))


def confident(form, w1):
    return form(Z(3, 4, 6), N(3), N(3, 4), ConfidenceWeights(Z(6 + 5), Z(1)), w1)


def requests():
    return StepRequests(N(3), N(3), N(3), torch.zeros(5, 40, dtype=torch.int32))


def planned(num_tokens, out=None):
    return plan_top(Z(3, 5), 0, N(3, 5), requests(), num_tokens, out and VerifyRows.empty(*out, "cpu"))


def recurrent(kind, q_width=5, turned=False):
    """Rows of one request through layers whose states may have other axes or strides."""
    made = Rows("cpu")
    q, inputs, gates = made.delta(3, (2, 4), (5, 3))
    states, rows = made.rand(4, 4, 3, 5), made.state_rows([3], [1])
    if kind == "commit":
        return commit_gated_delta(part(inputs, None), part(gates, None), states, replayed(rows, [1]))
    return gated_delta(q[..., :q_width], inputs, gates, states.mT.contiguous().mT if turned else states, rows)


def convolved(weight=lambda w: w, x=lambda x: x, commits=False, layers=True):
    made = Rows("cpu")
    (given, taps, bias), windows, rows = made.conv(3, 5), made.rand(2, 5, 3), made.state_rows([3], [1])
    if commits:
        return commit_conv_windows(x(given)[None], windows[None] if layers else windows, replayed(rows, [1]))
    return causal_conv_rows(given, weight(taps), bias, windows, rows)


def apart(x):
    return x.T.contiguous().T


REFUSED = {
    "narrow queries of a state": (lambda: recurrent("verify", q_width=4), r"q is \[3, 2, 4\] .* need \[3, 2, 5\]"),
    "states of no layer": (lambda: recurrent("commit"), "states is"),
    "states that lie apart": (lambda: recurrent("verify", turned=True), "3 dimensions of states must be contiguous"),
    "a narrow tap": (lambda: convolved(weight=lambda w: w[:, 1:]), r"expected \[C, W\]"),
    "taps that lie apart": (lambda: convolved(weight=apart), "contiguous"),
    "channels that lie apart": (lambda: convolved(x=apart, commits=True), "contiguous channels"),
    "windows of no layer": (lambda: convolved(commits=True, layers=False), "do not fit x"),
    "rows that differ": (lambda: add_norm(Z(3, 24), Z(2, 24), Z(24), EPS), "do not fit together"),
    "a weight that is narrow": (lambda: add_norm(Z(3, 24), Z(3, 24), Z(12), EPS), "do not fit together"),
    "too few queries": (lambda: rotated(q=(2, 4, 24)), "do not fit together"),
    "narrow keys": (lambda: rotated(k=(3, 2, 12)), "do not fit together"),
    "a narrow norm": (lambda: rotated(weight=12), "do not fit together"),
    "too few positions": (lambda: rotated(positions=2), r"positions \[3\]"),
    "an odd width": (lambda: silu_mul(Z(1, 5)), r"2 \* I"),
    "a narrow projection": (lambda: injected(width=2 * 2 * 3 * 64 - 1), r"L \* 2 \* kv_heads \* hd"),
    "a pool that lies apart": (lambda: injected(apart=True), "contiguous"),
    "rows of another width": (lambda: held(width=11), "up to 4 rows of 12 numbers"),
    "more rows than a ring has": (lambda: held(rows=5), "up to 4 rows of 12 numbers"),
    "a head of another rank": (lambda: confident(block_confidence, Z(9, 4)), "same checkpoint"),
    "no embeddings": (lambda: confident(block_confidence, None), "same checkpoint"),
    "another rank, in torch": (lambda: confident(block_confidence.reference, Z(9, 4)), "same checkpoint"),
    "fewer rows than requests": (lambda: planned(2), "3 requests need 3 rows"),
    "fewer rows than drafts": (lambda: plan_uniform(2, N(3, 5), requests(), 8), "3 requests need 9 rows"),
    "too few slots": (lambda: planned(9, (2, 9)), "2 request slots"),
    "too few rows of a buffer": (lambda: planned(9, (3, 8)), "8 rows where 3 and 9 are needed"),
    "slots of a step": (lambda: prepare(requests(), 5, 77, PreparedStep.empty(2, 5, "cpu")), "2 request slots"),
    "a step of another block": (lambda: prepare(requests(), 5, 77, PreparedStep.empty(3, 6, "cpu")), "gamma 6"),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_together_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


HEADS, HEAD_DIM = 8, 128


def pool_of(shape, device):
    """float16 zeros, which take memory only where they are written."""
    if device.type == "cuda":
        return torch.zeros(shape, dtype=torch.float16, device=device)
    memory = mmap.mmap(-1, 2 * math.prod(shape), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.float16).view(shape)


def rand(*shape, device):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(device, torch.float16)


def test_the_last_slot_of_the_last_layer_is_written(device):
    layers, slots = 5, 600_000
    assert layers * slots * HEADS * HEAD_DIM > 2**31
    inputs = (
        rand(1, layers * 2 * HEADS * HEAD_DIM, device=device),
        rand(layers, HEAD_DIM, device=device),
        1e-6,
        torch.ones(HEAD_DIM // 2, device=device),
        torch.tensor([3], device=device),
    )
    large = tuple(pool_of((layers, slots, HEADS, HEAD_DIM), device) for _ in range(2))
    small = tuple(pool_of((layers, 2, HEADS, HEAD_DIM), device) for _ in range(2))
    kv_inject(*inputs, torch.tensor([slots - 1], device=device), large)
    kv_inject.reference(*inputs, torch.tensor([1], device=device), small)
    for written, expected in zip(large, small, strict=True):
        torch.testing.assert_close(written[:, -1], expected[:, 1], atol=2e-3, rtol=2e-3)


def test_the_last_slot_of_a_pool_is_attended_to(device):
    slots = 2_200_000
    assert slots * HEADS * HEAD_DIM > 2**31
    q, k, v = (rand(1, HEADS, HEAD_DIM, device=device) for _ in range(3))
    contexts = []
    for size in (slots, 3):
        pools = tuple(pool_of((size, HEADS, HEAD_DIM), device) for _ in range(2))
        for pool, scale in zip(pools, (1, 2), strict=True):
            pool[-1], pool[1] = scale * rand(HEADS, HEAD_DIM, device=device), 1
        table = torch.tensor([[size - 1, 1]], dtype=torch.int32, device=device)
        row, lens, indptr = (torch.tensor(values, device=device) for values in ([0], [2], [0, 1]))
        contexts.append((pools, PagedWindows(table, row, lens, indptr, 1)))
    attended = window_attention(q, (k, v), *contexts[0], causal=True, scale=0.1)
    expected = window_attention.reference(
        q.float(),
        (k.float(), v.float()),
        tuple(x.float() for x in contexts[1][0]),
        contexts[1][1],
        causal=True,
        scale=0.1,
    )
    torch.testing.assert_close(attended.float(), expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize(("layers", "slots"), [(1, 140_000), (34, 4_000)])
def test_the_last_state_of_the_last_layer_is_read_and_advanced(layers, slots, device):
    made = Rows(device)
    assert max(layers - 1, 1) * (slots - 1) * 128 * 128 > 2**31
    q, inputs, gates = made.delta(2, (1, 1), (128, 128), (layers,))
    large, small = (pool_of((layers, size, 1, 128, 128), device) for size in (slots, 2))
    large[:, -1] = small[:, 1] = made.rand(layers, 1, 128, 128).half()
    outs = []
    for verify, commit, pools in (
        (gated_delta, commit_gated_delta, large),
        (gated_delta.reference, commit_gated_delta.reference, small),
    ):
        rows = made.state_rows([2], [pools.shape[1] - 1])
        outs.append(verify(q[-1], part(inputs, -1), part(gates, -1), pools[-1], rows))
        commit(inputs, gates, pools, replayed(rows, [2]))
    torch.testing.assert_close(*outs, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(large[:, -1], small[:, 1], atol=2e-3, rtol=2e-3)


BS = 3


@pytest.fixture
def launched(monkeypatch):
    """Forms of the kernels that were launched, which are not run."""
    found = []

    def note(function, *args, grid, warmup, **kwargs):
        found.append((function.__name__, *map(str, forms.bind(function, args, kwargs)[1:])))

    monkeypatch.setattr(type(choose_kernel), "run", note)
    return found


def step(seed, device):
    keys = torch.arange(BS, device=device)
    rows = SamplingBatch.from_lists([1.0] * BS, [-1] * BS, [1.0] * BS, [0.0] * BS, [None] * BS, device)
    return rows, RoundKeys(seed, 5, keys, keys)


def draft(device, v=64, depth=4, seed=0, heads=None):
    rows, keys = step(seed, device)
    base = torch.zeros(BS, depth, v, device=device)
    hidden, heads = torch.zeros(BS, depth, 4, device=device), heads or DraftHeads()
    chains = torch.zeros(BS, depth + 3, dtype=torch.int64, device=device)
    candidates = Candidates(chains, torch.zeros(2, 18, 8, device=device))
    draft_block(base, hidden, keys.positions, heads, rows, keys, candidates)


def judge(device, v=64, depth=4, seed=0):
    rows, keys = step(seed, device)
    lens = torch.full((BS,), depth, device=device)
    windows = Windows(lens, torch.arange(BS + 1, device=device) * (depth + 1))
    distribution = DraftDistribution(torch.zeros(BS, depth, v, device=device), torch.zeros(BS, depth, device=device))
    block = DraftBlock(torch.zeros(BS, depth, dtype=torch.int64, device=device), distribution=distribution)
    logits = torch.zeros(BS * (depth + 1), v, device=device)
    accept(block, windows, logits, keys.positions, rows, keys)


def distinct(launched, launch, *variants):
    """Forms of every kernel over all variants, as many as there were."""
    for variant in variants:
        launch(**variant)
    return {name: len({form for form in launched if form[0] == name}) for name, *_ in launched}


@pytest.mark.parametrize("launch", [draft, judge])
def test_no_seed_of_a_server_compiles_a_kernel(launch, launched, device):
    """Numpy, and so SGLang, takes seeds up to 2**32 - 1; Triton tells integers of 32 and of 64 bits apart."""
    seeds = [0, 1, 16, 2**30, 2**31, 2**32 - 1, 2**62]
    counts = distinct(launched, launch, *({"device": device, "seed": seed} for seed in seeds))
    assert set(counts.values()) == {1}


@pytest.mark.parametrize("v", [12288, 12290, 12292, 12296, 12297])
def test_no_depth_compiles_the_walk(v, launched, device):
    """Rows lie depth * v apart, which is a multiple of 16 for some depths only where v is a multiple of 2, 4 or 8."""
    # Of an odd vocabulary, the slots' first columns have odd addresses.
    most = 2 if v % 4 else 1
    counts = distinct(launched, draft, *({"device": device, "v": v, "depth": depth} for depth in range(1, 9)))
    assert counts == {"choose_kernel": most}


def test_neither_depth_nor_seed_compiles_the_walk_of_a_selector(launched, device):
    tables, projection = torch.zeros(2, 67, 5, device=device), torch.zeros(5, 4, device=device)
    heads = DraftHeads(MarkovWeights(*tables, projection=projection), shortlist=3)
    variants = [{"depth": depth, "seed": seed} for depth, seed in zip(range(1, 9), [0, 1, 2**40] * 3, strict=False)]
    assert distinct(launched, draft, *({"device": device, "v": 67, "heads": heads} | each for each in variants)) == {
        "choose_listed_kernel": 1
    }


@pytest.mark.parametrize("v", [12288, 12292, 12296])
def test_no_depth_compiles_the_verdict_anew(v, launched, device):
    """Except the widths of windows, which are rounded up to powers of two."""
    counts = distinct(launched, judge, *({"device": device, "v": v, "depth": depth} for depth in (4, 5, 6, 7)))
    assert counts["judge_kernel"] == counts["mass_kernel"] == 1
