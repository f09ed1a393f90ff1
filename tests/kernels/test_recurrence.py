"""Tests of the gated delta rule and the short convolution over ragged rows, and of commits of what was accepted.

Values are compared with those of SGLang's own kernels.
"""

import pytest
import torch
import triton.language as tl
from dspark_kernels import causal_conv_rows, commit_conv_windows, commit_gated_delta, gated_delta
from dspark_kernels.recurrence import causal_conv_rows as module
from recurrent_rows import Rows, part, replayed, served
from sglang.kernels.ops.attention.fla import fused_recurrent
from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_update

HEADS, DIMS = (2, 4), (5, 3)
LENS, SLOTS = [3, 0, 1, 4], [4, 2, -1, 1]
TOL = {"atol": 2e-6, "rtol": 2e-5}  # float32 sums of up to 40 products, in another order
FORMS = [(gated_delta.reference, commit_gated_delta.reference), (gated_delta, commit_gated_delta)]
BOTH = pytest.mark.parametrize("forms", FORMS, ids=["reference", "kernel"])


@BOTH
@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.float16], ids=str)
def test_several_rows_equal_as_many_decode_steps(forms, pool_dtype, device):
    """Also where a decode rounds the state that it stores."""
    verify, commit = forms
    made = Rows(device)
    q, inputs, gates = made.delta(5, (1, 2), (6, 3))
    pools = made.rand(1, 2, 2, 3, 6, dtype=pool_dtype)
    left, rows = pools.clone(), made.state_rows([5], [1])
    out = verify(q, inputs, gates, pools[0], rows)
    commit(part(inputs, None), part(gates, None), left, replayed(rows, [5]))
    one = made.state_rows([1], [1])
    for row in range(5):
        at = slice(row, row + 1)
        assert torch.equal(verify(q[at], part(inputs, at), gates, pools[0], one), out[at])
        commit(part(part(inputs, at), None), part(gates, None), pools, replayed(one, [1]))
    assert torch.equal(left, pools)


def states_after(forms, steps, device):
    """States of requests that are served speculatively, and by plain decode steps of the tokens that were accepted."""
    verify, commit = forms
    made, num_requests = Rows(device), 3
    pools = made.rand(1, num_requests + 1, 1, 2, 4)
    plain = pools.clone()
    for present, lens, accepted in steps:
        q, inputs, gates = made.delta(sum(lens), (1, 1), (4, 2))
        rows = made.state_rows(lens, [1 + request for request in present])
        assert verify(q, inputs, gates, pools[0], rows).isfinite().all()
        given = part(inputs, None), part(gates, None)
        commit(*given, pools, replayed(rows, accepted))
        for request, first, length in zip(present, rows.indptr.tolist(), accepted, strict=False):
            one = replayed(made.state_rows([1], [1 + request]), [1])
            for row in range(first, first + length):
                commit(part(given[0], (slice(None), slice(row, row + 1))), given[1], plain, one)
    return pools, plain


@pytest.mark.parametrize(
    ("forms", "num_steps"),
    [(FORMS[0], 200), (FORMS[1], 20), pytest.param(FORMS[1], 200, marks=pytest.mark.thorough)],
    ids=["reference", "kernel", "kernel, long"],
)
def test_a_state_after_many_steps_is_that_of_a_plain_decode(forms, num_steps, device):
    speculative, plain = states_after(forms, served(num_steps, 3, 3), device)
    assert torch.equal(speculative, plain)


@BOTH
def test_parts_of_wider_rows_and_slots_that_lie_apart(forms, device):
    verify, commit = forms
    made = Rows(device)
    q, inputs, gates = made.delta(4, (2, 2), (4, 3))
    wide = torch.cat([x.flatten(1) for x in (q, *vars(inputs).values())], 1)
    cuts = wide.split([8, 8, 6, 2, 2], 1)
    apart = type(inputs)(cuts[1].unflatten(1, (2, 4)), cuts[2].unflatten(1, (2, 3)), *cuts[3:])
    pools, rows = made.rand(1, 3, 2, 3, 4), made.state_rows([1, 3], [2, 1])
    spread = made.rand(1, 3, 5, 3, 4)[:, :, :2]
    spread.copy_(pools)
    expected = verify(q, inputs, gates, pools[0], rows)
    assert torch.equal(verify(cuts[0].unflatten(1, (2, 4)), apart, gates, spread[0], rows), expected)
    for kept, states in ((inputs, pools), (apart, spread)):
        commit(part(kept, None), part(gates, None), states, replayed(rows, [1, 2]))
    assert torch.equal(spread, pools)


CONV_LENS, CONV_SLOTS = [3, 0, 1, 5, 2], [4, 2, -1, 1, 3]
CONV_FORMS = [(causal_conv_rows.reference, commit_conv_windows.reference), (causal_conv_rows, commit_conv_windows)]
BOTH_CONVS = pytest.mark.parametrize("forms", CONV_FORMS, ids=["reference", "kernel"])


@pytest.fixture
def small_blocks(monkeypatch):
    """Let several programs share the channels of a case that is small."""
    monkeypatch.setattr(module, "_CHANNELS_PER_PROGRAM", 16)


@pytest.mark.usefixtures("small_blocks")
@BOTH_CONVS
@pytest.mark.parametrize("after", [0, 3])
def test_a_track_that_is_no_row_of_the_replay_is_left(forms, after, device):
    """Before the first row a window is no new one; the third is not replayed."""
    _, commit = forms
    made = Rows(device)
    (x, *_), windows = made.conv(3, 5, layers=(1,)), made.rand(1, 3, 5, 3)
    left = windows.clone()
    commit(x, left, replayed(made.state_rows([3], [1]), [2], ([after], [2])))
    assert torch.equal(left[:, 2], windows[:, 2]) and not torch.equal(left[:, 1], windows[:, 1])


@pytest.mark.usefixtures("small_blocks")
@BOTH_CONVS
@pytest.mark.parametrize("window_dtype", [torch.float32, torch.float16], ids=str)
def test_several_convolved_rows_equal_as_many_decode_steps(forms, window_dtype, device):
    """Also where a decode reads what it rounded when it stored it."""
    convolve, commit = forms
    made = Rows(device)
    (x, weight, bias), windows = made.conv(6, 5), made.rand(1, 2, 5, 3, dtype=window_dtype)
    left, rows = windows.clone(), made.state_rows([6], [1])
    out = convolve(x, weight, bias, windows[0], rows)
    commit(x[None], left, replayed(rows, [6]))
    one = made.state_rows([1], [1])
    for row in range(6):
        at = x[row : row + 1]
        assert torch.equal(convolve(at, weight, bias, windows[0], one)[0], out[row])
        commit(at[None], windows, replayed(one, [1]))
    assert torch.equal(left, windows)


@pytest.mark.usefixtures("small_blocks")
@BOTH_CONVS
def test_windows_after_many_steps_hold_the_last_accepted_rows(forms, device):
    _, commit = forms
    made, num_requests = Rows(device), 3
    windows = made.rand(1, num_requests + 1, 2, 3)
    texts = [windows[0, 1 + request].T.tolist() for request in range(num_requests)]
    for present, lens, accepted in served(40, num_requests, 5):
        x, rows = made.rand(sum(lens), 2), made.state_rows(lens, [1 + request for request in present])
        commit(x[None], windows, replayed(rows, accepted))
        for request, first, length in zip(present, rows.indptr.tolist(), accepted, strict=False):
            texts[request] += x[first : first + length].tolist()
    for request, text in enumerate(texts):
        assert windows[0, 1 + request].T.tolist() == text[-3:]


@pytest.mark.usefixtures("small_blocks")
@BOTH_CONVS
def test_output_goes_where_it_is_kept(forms, device):
    """And inputs may be a part of wider rows."""
    convolve, commit = forms
    made = Rows(device)
    (x, weight, bias), windows, rows = made.conv(4, 5), made.rand(3, 5, 3), made.state_rows([1, 2], [2, 1])
    expected = convolve(x, weight, bias, windows, rows)
    wide, kept = torch.cat([x, x], 1)[:, :5], made.rand(2, 4, 7)[1, :, :5]
    assert convolve(wide, weight, bias, windows, rows, kept) is kept
    assert torch.equal(kept, expected) and not kept[3].any()
    left = [windows[None].clone() for _ in range(2)]
    for pools, inputs in zip(left, (x, wide), strict=True):
        commit(inputs[None], pools, replayed(rows, [1, 2]))
    assert torch.equal(*left)


STOCK_HEADS, STOCK_DIMS = (2, 4), (6, 5)
STOCK_LENS, STOCK_SLOTS = [3, 0, 1, 4], [4, 2, 3, 1]


@pytest.fixture
def interpreted_exp(monkeypatch, device):
    """Let the interpreter find the exponential that SGLang has under a name of its own."""

    def exp(x):
        return tl.exp(x)

    if device.type != "cuda":
        monkeypatch.setattr(fused_recurrent, "exp", exp)


def decoded(q, inputs, gates, states, slot):
    """Outputs of SGLang's decode of the rows, which advances ``states``."""
    scale, outs = q.shape[2] ** -0.5, []
    for row in range(len(q)):
        at = slice(row, row + 1)
        mixed = torch.cat([x[at].flatten(1) for x in (q, inputs.k, inputs.v)], 1)
        out = torch.zeros(1, 1, *inputs.v.shape[1:], dtype=q.dtype, device=q.device)
        fused_recurrent.fused_recurrent_gated_delta_rule_packed_decode(
            mixed, inputs.a[at], inputs.b[at], gates.a_log, gates.dt_bias, scale, states, out, slot, True
        )
        outs.append(out[0])
    return torch.cat(outs)


@pytest.mark.usefixtures("interpreted_exp")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_delta_rule_equals_a_plain_decode(dtype, device):
    """Outputs of verified rows, and the states that a commit of all rows leaves; to the bit where nothing is fused.

    The assembler of a GPU fuses the products and sums of the two kernels differently.
    """
    tolerance = {"rtol": 0, "atol": 0} if device.type == "cpu" else {}
    made = Rows(device, dtype)
    q, inputs, gates = made.delta(sum(STOCK_LENS), STOCK_HEADS, STOCK_DIMS)
    states, rows = (
        made.rand(6, STOCK_HEADS[1], *STOCK_DIMS[::-1], dtype=torch.float32),
        made.state_rows(STOCK_LENS, STOCK_SLOTS, torch.int32),
    )
    out, pools = gated_delta(q, inputs, gates, states, rows), states[None].clone()
    commit_gated_delta(part(inputs, None), part(gates, None), pools, replayed(rows, STOCK_LENS))
    for first, length, request in zip(rows.indptr.tolist(), STOCK_LENS, range(len(STOCK_LENS)), strict=False):
        if length:
            at = slice(first, first + length)
            found = decoded(q[at], part(inputs, at), gates, states, rows.slots[request : request + 1])
            torch.testing.assert_close(found, out[at], **tolerance)
    torch.testing.assert_close(pools[0], states, **tolerance)


@pytest.mark.usefixtures("interpreted_exp")
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_convolution_equals_a_plain_decode_to_the_bit(dtype, has_bias, device):
    """Outputs of verified rows, and the windows that a commit leaves. The interpreter multiplies no bfloat16."""
    made = Rows(device, dtype)
    (x, weight, bias), windows = made.conv(sum(STOCK_LENS), 21, bias=has_bias), made.rand(6, 21, 3)
    rows = made.state_rows(STOCK_LENS, STOCK_SLOTS, torch.int32)
    out, pools = causal_conv_rows(x, weight, bias, windows, rows), windows[None].clone()
    commit_conv_windows(x[None], pools, replayed(rows, STOCK_LENS))
    for first, length, request in zip(rows.indptr.tolist(), STOCK_LENS, range(len(STOCK_LENS)), strict=False):
        for row in range(first, first + length):
            found = causal_conv1d_update(
                x[row : row + 1], windows, weight, bias, "silu", conv_state_indices=rows.slots[request : request + 1]
            )
            assert torch.equal(found[0], out[row])
    assert torch.equal(pools[0], windows)
