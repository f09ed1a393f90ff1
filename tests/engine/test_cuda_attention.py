"""The target's attention over verification rows, as a GPU server computes it; here in torch."""

from types import SimpleNamespace

import pytest
import torch
from dspark_kernels import PagedWindows, window_attention_ref

from sglang_dspark.engine.forward.cuda_attention import CudaVerifyBackend

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8


class Pool:
    """What is used of SGLang's K/V pool."""

    def __init__(self, slots):
        self.k, self.v = (torch.randn(slots, KV_HEADS, HEAD_DIM) for _ in range(2))

    def set_kv_buffer(self, layer, where, k, v):
        self.k[where.loc], self.v[where.loc] = k, v

    def get_key_buffer(self, layer_id):
        return self.k

    def get_value_buffer(self, layer_id):
        return self.v


@pytest.fixture
def verified():
    """Attention of two requests with 3 and 2 rows, with the pool, the layout, and what the forward was given."""
    torch.manual_seed(1)
    backend = CudaVerifyBackend.__new__(CudaVerifyBackend)
    backend.token_to_kv_pool, backend.req_to_token = Pool(32), torch.randperm(30).view(3, 10).int() + 1
    rows, lens, indptr = torch.tensor([2, 0]), torch.tensor([5, 1]), torch.tensor([0, 3, 5])
    q = torch.randn(5, HEADS * HEAD_DIM)
    k, v = (torch.randn(5, KV_HEADS * HEAD_DIM) for _ in range(2))
    layer = SimpleNamespace(
        tp_q_head_num=HEADS,
        tp_k_head_num=KV_HEADS,
        tp_v_head_num=KV_HEADS,
        qk_head_dim=HEAD_DIM,
        v_head_dim=HEAD_DIM,
        layer_id=0,
        scaling=HEAD_DIM**-0.5,
    )
    slots = torch.cat([backend.req_to_token[2, 5:8], backend.req_to_token[0, 1:3]]).long()
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_target_verify=lambda: True),
        spec_info=SimpleNamespace(indptr=indptr, draft_token_num=3),
        req_pool_indices=rows,
        seq_lens=lens,
        out_cache_loc=slots,
    )
    attended = backend.forward_extend(q, k, v, layer, batch)
    return attended, (q, k, v), backend, PagedWindows(backend.req_to_token, rows, lens, indptr, 3), slots


def heads_of(x):
    return x.view(5, -1, HEAD_DIM)


def test_no_row_sees_a_later_one(verified):
    attended, rows, backend, windows, _ = verified
    pool = backend.token_to_kv_pool.k, backend.token_to_kv_pool.v
    expected = window_attention_ref(*map(heads_of, rows), pool, windows, causal=True, scale=HEAD_DIM**-0.5)
    torch.testing.assert_close(heads_of(attended), expected)


def test_what_is_verified_goes_into_the_pool(verified):
    _, (_, k, v), backend, _, slots = verified
    assert torch.equal(backend.token_to_kv_pool.k[slots], heads_of(k))
    assert torch.equal(backend.token_to_kv_pool.v[slots], heads_of(v))
