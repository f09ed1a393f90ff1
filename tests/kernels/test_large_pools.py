"""Pools of more than two thousand million elements: offsets in them are computed in 64 bits."""

import math
import mmap

import pytest
import torch
from dspark_kernels import (
    PagedWindows,
    commit_gated_delta,
    commit_gated_delta_ref,
    gated_delta,
    gated_delta_ref,
    kv_inject,
    kv_inject_ref,
    window_attention,
    window_attention_ref,
)
from recurrent_rows import Rows, part, replayed

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
    kv_inject_ref(*inputs, torch.tensor([1], device=device), small)
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
    expected = window_attention_ref(
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
        (gated_delta_ref, commit_gated_delta_ref, small),
    ):
        rows = made.state_rows([2], [pools.shape[1] - 1])
        outs.append(verify(q[-1], part(inputs, -1), part(gates, -1), pools[-1], rows))
        commit(inputs, gates, pools, replayed(rows, [2]))
    torch.testing.assert_close(*outs, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(large[:, -1], small[:, 1], atol=2e-3, rtol=2e-3)
