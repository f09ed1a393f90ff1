"""Inputs at the ends of their range, that lie apart in memory, or do not fit together."""

import pytest
import torch
from dspark_kernels import (
    ConfidenceWeights,
    HeldRows,
    PreparedStep,
    StepRequests,
    VerifyRows,
    add_norm,
    block_confidence,
    causal_conv_rows,
    commit_conv_windows,
    commit_gated_delta,
    distribution_loss,
    gated_delta,
    hold_rows,
    kv_inject,
    plan_top,
    plan_uniform,
    prepare,
    qk_norm_rope,
    silu_mul,
)
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
