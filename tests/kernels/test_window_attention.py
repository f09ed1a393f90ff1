"""Attention of few query rows per request, on the CPU and as a Triton kernel, against dense attention in float64."""

import sys

import pytest
import torch
from dspark_kernels.ragged_attention import attend_groups, group_contexts
from dspark_kernels.window_attention import num_splits, window_attention, window_attention_ref

FP32_TOL = {"atol": 2e-6, "rtol": 2e-6}  # sums of at most 200 products of unit-variance numbers
HALF_TOL = {"atol": 2e-2, "rtol": 2e-2}


def dense_attention(q, k, v, mask):
    """[m, heads, hd] over [n, kv_heads, hd] in float64; mask [m, n] True where visible."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = torch.einsum("mhd,nhd->hmn", q, k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~mask, float("-inf"))
    return torch.einsum("hmn,nhd->mhd", scores.softmax(-1), v)


WINDOWS = [
    pytest.param((5, 0, 131, 64), (7, 7, 7, 7), (6, 2, 32), id="blocks-gqa3"),
    pytest.param((1,), (1,), (3, 3, 16), id="one-token-mha"),
    pytest.param((17, 3, 90), (4, 1, 2), (9, 3, 64), id="ragged-smollm2"),
    pytest.param((9, 170, 0), (5, 0, 3), (4, 1, 24), id="empty-request-mqa-odd-head"),
]


def window_case(prefix_lens, query_lens, shape, device, dtype=torch.float32, padding=3):
    generator = torch.Generator().manual_seed(sum(prefix_lens))
    heads, kv_heads, head_dim = shape
    bs, slots, num_rows = len(prefix_lens), 1 + sum(prefix_lens), sum(query_lens) + padding

    def rand(*shape):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    # As a fused projection leaves them.
    q, k, v = rand(num_rows, heads + 2 * kv_heads, head_dim).split([heads, kv_heads, kv_heads], dim=1)
    pools = rand(slots, kv_heads, head_dim), rand(slots, kv_heads, head_dim)
    table = torch.randint(1, max(2, slots), (bs + 3, max(prefix_lens) + 5), generator=generator, dtype=torch.int32)
    rows = torch.randperm(bs + 3, generator=generator)[:bs]
    indptr = torch.tensor([0, *query_lens]).cumsum(0)
    return (
        q,
        k,
        v,
        *pools,
        table.to(device),
        rows.to(device),
        torch.tensor(prefix_lens, device=device),
        indptr.to(device),
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("prefix_lens", "query_lens", "shape"), WINDOWS)
def test_reference_equals_dense_attention(prefix_lens, query_lens, shape, causal):
    q, k, v, k_pool, v_pool, table, rows, _, indptr = case = window_case(prefix_lens, query_lens, shape, "cpu")
    out = window_attention_ref(*case, causal=causal, scale=shape[2] ** -0.5)
    for index, (row, prefix, length) in enumerate(zip(rows.tolist(), prefix_lens, query_lens, strict=True)):
        part, slots = slice(int(indptr[index]), int(indptr[index + 1])), table[row, :prefix].long()
        keys, values = torch.cat([k_pool[slots], k[part]]), torch.cat([v_pool[slots], v[part]])
        mask = torch.ones(length, prefix + length, dtype=torch.bool)
        expected = dense_attention(q[part], keys, values, mask.tril(prefix) if causal else mask)
        torch.testing.assert_close(out[part].double(), expected, **FP32_TOL)


@pytest.mark.parametrize("splits", [1, 2, 8])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("prefix_lens", "query_lens", "shape"), WINDOWS)
def test_kernel_equals_reference(prefix_lens, query_lens, shape, causal, splits, device):
    case = window_case(prefix_lens, query_lens, shape, device)
    how = {"causal": causal, "scale": shape[2] ** -0.5}
    out = window_attention(*case, width=max(query_lens), splits=splits, **how)
    rows = slice(0, sum(query_lens))
    torch.testing.assert_close(out[rows], window_attention_ref(*case, **how)[rows], **FP32_TOL)


@pytest.mark.parametrize("max_tile", [16 * 64, 32 * 64, 64 * 64])
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (14, 2), (5, 1)])
def test_groups_of_heads_are_shared_out(heads, kv_heads, max_tile, device, monkeypatch):
    """Shares of one head up to all of a group, and a last share that is not full."""
    monkeypatch.setattr(sys.modules[window_attention.__module__], "_MAX_TILE", max_tile)
    case = window_case((33, 0, 70), (4, 7, 1), (heads, kv_heads, 64), device)
    for causal, splits in ((True, 1), (False, 2)):
        out = window_attention(*case, width=7, causal=causal, scale=0.125, splits=splits)
        expected = window_attention_ref(*case, causal=causal, scale=0.125)
        torch.testing.assert_close(out[:12], expected[:12], **FP32_TOL)


def test_kernel_in_16_bit(device):
    # The interpreter's tl.dot multiplies the bit patterns of bfloat16.
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    prefix_lens, query_lens, shape = (70, 200), (3, 8), (8, 2, 64)
    case = window_case(prefix_lens, query_lens, shape, device, dtype)
    how = {"causal": True, "scale": shape[2] ** -0.5}
    expected = window_attention_ref(*(x.float() if x.is_floating_point() else x for x in case), **how)
    for splits in (1, 4):
        out = window_attention(*case, width=8, splits=splits, **how)
        torch.testing.assert_close(out[:11].float(), expected[:11], **HALF_TOL)


def test_splits_fill_the_processors():
    assert num_splits(1, 8, 132) == 32
    assert num_splits(8, 8, 132) == 4
    assert num_splits(64, 8, 132) == 1
    assert num_splits(512, 8, 132) == 1


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
