"""The stand-in's layers with gated delta nets: as this project verifies them, whether a text comes at once or not."""

from types import SimpleNamespace

import pytest
import torch
from dspark_kernels import causal_conv_rows, commit_conv_windows, commit_gated_delta, gated_delta
from recurrent_rows import Rows, part, replayed

from sglang_dspark.on_cpu import sgl_kernel
from sglang_dspark.on_cpu.sgl_kernel import mamba

HEADS, DIMS, CHANNELS = (2, 4), (6, 5), 7
SLOTS = [4, 2, 3]


@pytest.fixture
def made():
    return Rows(torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("windows_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_decoded_token_is_convolved_as_a_verified_one(dtype, windows_dtype):
    made = Rows(torch.device("cpu"), dtype)
    x, weight, bias = made.conv(3, CHANNELS)
    expected = made.rand(6, CHANNELS, 3, dtype=windows_dtype)
    found, rows = expected.clone(), made.state_rows([1, 1, 1], SLOTS)
    out = mamba.causal_conv1d_update_cpu(x, found, weight, bias, "silu", conv_state_indices=rows.slots)
    torch.testing.assert_close(out, causal_conv_rows(x, weight, bias, expected, rows))
    commit_conv_windows(x[None], expected[None], replayed(rows, [1, 1, 1]))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_decoded_token_advances_its_state_as_a_verified_one(dtype):
    made = Rows(torch.device("cpu"), dtype)
    q, inputs, gates = made.delta(3, HEADS, DIMS)
    expected = made.rand(6, HEADS[1], *DIMS[::-1], dtype=torch.float32)
    found, rows = expected.clone(), made.state_rows([1, 1, 1], SLOTS)
    out = decoded(q, inputs, gates, found, rows)
    torch.testing.assert_close(out, gated_delta(q, inputs, gates, expected, rows))
    commit_gated_delta(part(inputs, None), part(gates, None), expected[None], replayed(rows, [1, 1, 1]))
    torch.testing.assert_close(found, expected)


def decoded(q, inputs, gates, states, rows):
    """Outputs of rows of which each request has those of ``rows``; ``states`` advance."""
    return mamba.fused_sigmoid_gating_delta_rule_update_cpu(
        A_log=gates.a_log,
        dt_bias=gates.dt_bias,
        q=q[None],
        k=inputs.k[None],
        v=inputs.v[None],
        a=inputs.a,
        b=inputs.b,
        initial_state_source=states,
        initial_state_indices=rows.slots,
        cu_seqlens=rows.indptr,
    )[0]


@pytest.mark.parametrize("lens", [[3, 1, 5], [2, 2, 1]])
def test_prompts_at_once_are_their_tokens_one_by_one(made, lens):
    """Also those that go on behind a prefix, and those shorter than a window."""
    total, rows = sum(lens), made.state_rows(lens, SLOTS, torch.int32)
    x, weight, bias = made.conv(total, CHANNELS)
    q, inputs, gates = made.delta(total, HEADS, DIMS)
    windows, states = made.rand(6, CHANNELS, 3), made.rand(6, HEADS[1], *DIMS[::-1])
    windows[SLOTS[1]] = 0.0
    one_by_one = SimpleNamespace(windows=windows.clone(), states=states.clone())
    windows[SLOTS[1]] = 9.0  # of whoever had the slot before
    found = mamba.causal_conv1d_fn_cpu(
        x.T,
        weight,
        bias,
        activation="silu",
        conv_states=windows,
        has_initial_state=torch.tensor([True, False, True]),
        cache_indices=rows.slots,
        query_start_loc=rows.indptr,
    ).T
    outputs = decoded(q, inputs, gates, states, rows)
    for first, end, slot in rows.with_rows():
        for row in range(first, end):
            at, single = slice(row, row + 1), made.state_rows([1], [slot])
            token = mamba.causal_conv1d_update_cpu(
                x[at], one_by_one.windows, weight, bias, "silu", conv_state_indices=single.slots
            )
            torch.testing.assert_close(found[at], token)
            expected = decoded(q[at], part(inputs, at), gates, one_by_one.states, single)
            torch.testing.assert_close(outputs[at], expected)
    torch.testing.assert_close(windows, one_by_one.windows)
    torch.testing.assert_close(states, one_by_one.states)


def test_norms_and_gates_are_their_formulas(made):
    x, gate, weight = made.rand(3, 8), made.rand(3, 8), made.rand(8)
    unit = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    expected = unit * weight * torch.nn.functional.silu(gate)
    torch.testing.assert_close(sgl_kernel.layernorm_fn(x, weight, None, z=gate, eps=1e-6), expected)
    torch.testing.assert_close(sgl_kernel.rms_norm_gated(x, gate, weight, None, "silu", eps=1e-6), expected)
    found = sgl_kernel.rms_norm_gated(x, gate, weight, None, "sigmoid", eps=1e-6)
    torch.testing.assert_close(found, unit * weight * gate.sigmoid())

    shared, routed, scorer = made.rand(3, 8), made.rand(3, 8), made.rand(8)
    expected = routed + (x @ scorer).sigmoid()[:, None] * shared
    sgl_kernel.fused_gate_sigmoid_mul_add(x, scorer, shared, routed)
    torch.testing.assert_close(routed, expected)


def test_heads_are_split_and_normalised(made):
    q_gate, k, q_weight, k_weight = made.rand(2, 2 * 2 * 4), made.rand(2, 4), made.rand(4), made.rand(4)
    q, key, gate = sgl_kernel.fused_qk_gemma_rmsnorm_with_gate_cpu(q_gate, k, q_weight, k_weight, 1e-6, 4, 2)
    heads = q_gate.view(2 * 2, 2, 4)
    assert torch.equal(gate, heads[:, 1]) and gate.is_contiguous()
    for found, given, weight in ((q, heads[:, 0], q_weight), (key, k, k_weight)):
        torch.testing.assert_close(found, given / (given.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + weight))

    qkvz, ba = torch.arange(2 * 18.0).view(2, 18), torch.arange(2 * 4.0).view(2, 4)
    mixed, z, b, a = sgl_kernel.fused_qkvzba_split_reshape_cat_contiguous_cpu(qkvz, ba, 1, 2, 3, 3)
    assert (mixed.shape, z.shape) == ((2, 12), (2, 2, 3))
    assert mixed[1].tolist() == list(range(18, 30)) and z[1].flatten().tolist() == list(range(30, 36))
    assert (b[1].tolist(), a[1].tolist()) == ([4.0, 5.0], [6.0, 7.0])
