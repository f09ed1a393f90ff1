"""Recurrent layers against SGLang's own kernels, with both under Triton's interpreter where there is no GPU."""

import pytest
import torch
import triton.language as tl
from dspark_kernels import causal_conv_rows, commit_conv_windows, commit_gated_delta, gated_delta
from recurrent_rows import Rows, part, replayed
from sglang.kernels.ops.attention.fla import fused_recurrent
from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_update

HEADS, DIMS = (2, 4), (6, 5)
LENS, SLOTS = [3, 0, 1, 4], [4, 2, 3, 1]


@pytest.fixture(autouse=True)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_delta_rule_equals_a_plain_decode(dtype, device):
    """Outputs of verified rows, and the states that a commit of all rows leaves; to the bit where nothing is fused.

    The assembler of a GPU fuses the products and sums of the two kernels differently.
    """
    tolerance = {"rtol": 0, "atol": 0} if device.type == "cpu" else {}
    made = Rows(device, dtype)
    q, inputs, gates = made.delta(sum(LENS), HEADS, DIMS)
    states, rows = made.rand(6, HEADS[1], *DIMS[::-1], dtype=torch.float32), made.state_rows(LENS, SLOTS, torch.int32)
    out, pools = gated_delta(q, inputs, gates, states, rows), states[None].clone()
    commit_gated_delta(part(inputs, None), part(gates, None), pools, replayed(rows, LENS))
    for first, length, request in zip(rows.indptr.tolist(), LENS, range(len(LENS)), strict=False):
        if length:
            at = slice(first, first + length)
            found = decoded(q[at], part(inputs, at), gates, states, rows.slots[request : request + 1])
            torch.testing.assert_close(found, out[at], **tolerance)
    torch.testing.assert_close(pools[0], states, **tolerance)


@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_convolution_equals_a_plain_decode_to_the_bit(dtype, has_bias, device):
    """Outputs of verified rows, and the windows that a commit leaves. The interpreter multiplies no bfloat16."""
    made = Rows(device, dtype)
    (x, weight, bias), windows = made.conv(sum(LENS), 21, bias=has_bias), made.rand(6, 21, 3)
    rows = made.state_rows(LENS, SLOTS, torch.int32)
    out, pools = causal_conv_rows(x, weight, bias, windows, rows), windows[None].clone()
    commit_conv_windows(x[None], pools, replayed(rows, LENS))
    for first, length, request in zip(rows.indptr.tolist(), LENS, range(len(LENS)), strict=False):
        for row in range(first, first + length):
            found = causal_conv1d_update(
                x[row : row + 1], windows, weight, bias, "silu", conv_state_indices=rows.slots[request : request + 1]
            )
            assert torch.equal(found[0], out[row])
    assert torch.equal(pools[0], windows)
