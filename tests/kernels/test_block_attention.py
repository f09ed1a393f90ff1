"""Attention of draft blocks and of few query rows: the paged forms against dense attention in float64."""

import subprocess
import sys

import pytest
import torch
from dspark_kernels.block_attention import block_attention_ref
from dspark_kernels.ragged_attention import attend_groups, group_contexts

FP32_TOL = {"atol": 2e-6, "rtol": 2e-6}  # sums of at most 131 products of unit-variance numbers


def dense_attention(q, k, v, mask):
    """[m, heads, hd] over [n, kv_heads, hd] in float64; mask [m, n] True where visible."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = torch.einsum("mhd,nhd->hmn", q, k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~mask, float("-inf"))
    return torch.einsum("hmn,nhd->mhd", scores.softmax(-1), v)


def block_case(prefix_lens, gamma, heads, kv_heads, head_dim, seed=0):
    generator = torch.Generator().manual_seed(seed)
    bs, slots = len(prefix_lens), 1 + sum(prefix_lens)

    def rand(*shape):
        return torch.randn(*shape, generator=generator)

    q, k, v = (rand(bs * gamma, h, head_dim) for h in (heads, kv_heads, kv_heads))
    pools = rand(slots, kv_heads, head_dim), rand(slots, kv_heads, head_dim)
    req_to_token = torch.randint(1, slots, (bs + 3, max(prefix_lens) + 5), generator=generator, dtype=torch.int32)
    rows = torch.randperm(bs + 3, generator=generator)[:bs]
    return q, k, v, *pools, req_to_token, rows, torch.tensor(prefix_lens)


SHAPES = [
    pytest.param(((5, 0, 131, 64), 7, 6, 2, 32), id="bs4-g7-gqa3"),
    pytest.param(((1,), 1, 3, 3, 16), id="bs1-g1-mha"),
    pytest.param(((17, 3), 4, 9, 3, 64), id="bs2-g4-smollm2"),
    pytest.param(((9, 70), 5, 4, 1, 24), id="bs2-g5-mqa-odd-head"),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_reference_equals_dense_attention(shape):
    q, k, v, k_pool, v_pool, table, rows, prefix_lens = case = block_case(*shape)
    out = block_attention_ref(*case)
    gamma = shape[1]
    for index, (row, prefix) in enumerate(zip(rows.tolist(), prefix_lens.tolist(), strict=True)):
        block, slots = slice(index * gamma, (index + 1) * gamma), table[row, :prefix].long()
        keys, values = torch.cat([k_pool[slots], k[block]]), torch.cat([v_pool[slots], v[block]])
        expected = dense_attention(q[block], keys, values, torch.ones(gamma, prefix + gamma, dtype=torch.bool))
        torch.testing.assert_close(out[block].double(), expected, **FP32_TOL)


def test_kernel_equals_reference_under_the_interpreter():
    """Triton decides at import time whether it interprets, hence a process of its own."""
    script = f"""
import sys, torch
sys.path.insert(0, {str(__file__.rsplit("/", 1)[0])!r})
from test_block_attention import SHAPES, block_case
from dspark_kernels.block_attention import block_attention, block_attention_ref
for shape in SHAPES:
    case = block_case(*shape.values[0])
    torch.testing.assert_close(block_attention(*case), block_attention_ref(*case), atol=2e-6, rtol=2e-6)
    print("equal", shape.id)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        check=False,
        env={**__import__("os").environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("equal") == len(SHAPES)


RAGGED = [
    pytest.param([1], [1], id="one-token"),
    pytest.param([40], [1], id="decode"),
    pytest.param([8], [8], id="no-prefix"),
    pytest.param([50, 50, 50], [3, 3, 3], id="uniform"),
    pytest.param([50, 45, 40], [1, 6, 3], id="one-padded-group"),
    pytest.param([3, 200, 64, 4, 190, 60], [2, 1, 6, 4, 3, 1], id="several-groups"),
]


@pytest.mark.parametrize(("key_lens", "query_lens"), RAGGED)
def test_ragged_attention_is_causal_from_the_right(key_lens, query_lens):
    generator = torch.Generator().manual_seed(sum(key_lens))
    q = torch.randn(sum(query_lens), 6, 32, generator=generator)
    pools = [torch.randn(300, 2, 32, generator=generator) for _ in range(2)]
    table = torch.stack([1 + torch.randperm(299, generator=generator)[:210] for _ in range(9)]).int()
    rows = torch.randperm(9, generator=generator)[: len(key_lens)].tolist()
    groups = group_contexts(table, rows, key_lens, query_lens, causal=True, heads_per_kv=3, dtype=torch.float32)
    out = attend_groups(q, *pools, groups, 32**-0.5)
    start = 0
    for row, num_keys, num_queries in zip(rows, key_lens, query_lens, strict=True):
        k, v = (pool[table[row, :num_keys].long()] for pool in pools)
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
        part = slice(start, start + num_queries)
        torch.testing.assert_close(out[part].double(), dense_attention(q[part], k, v, mask), **FP32_TOL)
        start += num_queries
