"""The target's attention over verification rows, as a GPU server computes it; here in torch."""

from types import SimpleNamespace

import pytest
import torch
from dense import FP32_TOL, dense_attention
from dspark_kernels import PagedWindows, window_attention_ref
from sglang.srt.layers.attention import hybrid_attn_backend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang_objects import forward, partly

from sglang_dspark.engine import verify as module
from sglang_dspark.engine.verify import CudaVerifyBackend, DSparkVerifyInput, PhasedBackend, check_pool
from sglang_dspark.errors import ConfigError

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8


class Pool:
    """The part of SGLang's K/V pool that is used; like that one it divides in place if it has to round."""

    def __init__(self, slots, dtype):
        self.dtype = dtype
        self.k, self.v = (torch.randn(slots, KV_HEADS, HEAD_DIM).to(dtype) for _ in range(2))

    def set_kv_buffer(self, layer, where, k, v, k_scale=None, v_scale=None):
        for pool, rows, scale in ((self.k, k, k_scale), (self.v, v, v_scale)):
            if rows.dtype != self.dtype:
                rows.div_(scale or 1.0)
            pool.view(torch.uint8).view(len(pool), -1)[where.loc] = rows.to(self.dtype).view(torch.uint8).flatten(1)

    def get_key_buffer(self, layer_id):
        return self.k

    def get_value_buffer(self, layer_id):
        return self.v


def a_layer(scales=(None, None), keys_before=-1):
    layer = RadixAttention(HEADS, HEAD_DIM, HEAD_DIM**-0.5, KV_HEADS, layer_id=0)
    layer.sliding_window_size = keys_before  # SGLang itself would take 0 for no window
    layer.k_scale_float, layer.v_scale_float = scales
    return layer


def verify(dtype=torch.float32, scales=(None, None), keys_before=-1, sinks=None):
    """Attention of two requests with 3 and 2 rows, with the pool, the layout, and what the forward was given."""
    torch.manual_seed(1)
    backend = CudaVerifyBackend.__new__(CudaVerifyBackend)
    backend.token_to_kv_pool, backend.req_to_token = Pool(32, dtype), torch.randperm(30).view(3, 10).int() + 1
    rows, lens, indptr = torch.tensor([2, 0]), torch.tensor([5, 1]), torch.tensor([0, 3, 5])
    q = torch.randn(5, HEADS * HEAD_DIM)
    k, v = (torch.randn(5, KV_HEADS * HEAD_DIM) for _ in range(2))
    layer = a_layer(scales, keys_before)
    slots = torch.cat([backend.req_to_token[2, 5:8], backend.req_to_token[0, 1:3]]).long()
    layout = partly(DSparkVerifyInput, indptr=indptr, draft_token_num=3)
    batch = forward(spec_info=layout, req_pool_indices=rows, seq_lens=lens, out_cache_loc=slots)
    given = q.clone(), k.clone(), v.clone()
    attended = backend.forward_extend(q, k, v, layer, batch, sinks=sinks)
    return attended, given, backend, PagedWindows(backend.req_to_token, rows, lens, indptr, 3), slots


def heads_of(x):
    return x.view(5, -1, HEAD_DIM)


@pytest.mark.parametrize("sinks", [None, torch.tensor([3.0, -1.0, 0.0, 2.0]).bfloat16()], ids=["plain", "sinks"])
@pytest.mark.parametrize("keys_before", [-1, 0, 3, 6])
def test_which_keys_a_row_sees(keys_before, sinks):
    """No row sees a later one, a layer without a window (-1) all before, and heads have sinks, each its own."""
    attended, rows, backend, windows, slots = verify(keys_before=keys_before, sinks=sinks)
    pool = backend.token_to_kv_pool.k, backend.token_to_kv_pool.v
    q, *kv = map(heads_of, rows)
    for request, (start, end) in enumerate([(0, 3), (3, 5)]):
        prefix = int(windows.prefix_lens[request])
        before = backend.req_to_token[windows.req_pool_indices[request], :prefix].long()
        keys, values = (torch.cat([cached[before], x[start:end]]) for cached, x in zip(pool, kv, strict=True))
        ages = prefix + torch.arange(end - start)[:, None] - torch.arange(prefix + end - start)
        seen = (ages >= 0) & ((ages <= keys_before) | (keys_before < 0))
        expected = dense_attention(q[start:end], keys, values, seen, sinks)
        torch.testing.assert_close(heads_of(attended)[start:end].double(), expected, **FP32_TOL)
    assert all(torch.equal(stored[slots], x) for stored, x in zip(pool, kv, strict=True))


@pytest.mark.parametrize("translated", [True, False], ids=["a step", "a dummy forward"])
def test_a_layer_in_a_pool_of_windows(translated):
    """Its K/V lie elsewhere than those of other layers, in heads of its own; a later layer reads them again."""
    torch.manual_seed(2)
    heads = {"head_num": 1, "head_dim": 16, "swa_head_num": KV_HEADS}
    heads |= {"swa_head_dim": HEAD_DIM, "swa_v_head_dim": HEAD_DIM}
    backend = CudaVerifyBackend.__new__(CudaVerifyBackend)
    backend.req_to_token = torch.randperm(30).view(3, 10).int() + 1
    backend.token_to_kv_pool = pool = SWAKVPool(
        *(31, 12, 1, torch.float32),
        **heads,
        swa_attention_layer_ids=[0],
        full_attention_layer_ids=[1],
        device="cpu",
        enable_alt_stream=False,
    )
    for part in (pool.full_kv_pool, pool.swa_kv_pool):
        part.k_buffer[0].fill_(torch.nan)
        part.v_buffer[0].fill_(torch.nan)
    keys, values = (torch.randn(8, KV_HEADS, HEAD_DIM) for _ in range(2))  # of eight positions, five of them stored
    slots, translation = backend.req_to_token[2, :8].long(), torch.zeros(33, dtype=torch.int64)
    translation[slots[2:]] = 1 + torch.randperm(12)[:6]  # of what windows have left there is nothing
    pool.register_mapping(translation)
    pool.swa_kv_pool.k_buffer[0][translation[slots[2:5]]] = keys[2:5]
    pool.swa_kv_pool.v_buffer[0][translation[slots[2:5]]] = values[2:5]
    layout = partly(DSparkVerifyInput, indptr=torch.tensor([0, 3]), draft_token_num=3)
    if translated:
        layout.slots_of_windows = translation[slots[5:]]
    of_request = {"req_pool_indices": torch.tensor([2]), "seq_lens": torch.tensor([5])}
    batch = forward(spec_info=layout, out_cache_loc=slots[5:], **of_request)
    q, layer = torch.randn(3, HEADS * HEAD_DIM), a_layer(keys_before=3)
    found = backend.forward_extend(q, keys[5:].flatten(1), values[5:].flatten(1), layer, batch)
    again = backend.forward_extend(q, None, None, layer, batch, save_kv_cache=False)
    ages = 5 + torch.arange(3)[:, None] - torch.arange(8)
    expected = dense_attention(q.view(3, -1, HEAD_DIM), keys, values, (ages >= 0) & (ages <= 3))
    for attended in (found, again):
        torch.testing.assert_close(attended.view(3, -1, HEAD_DIM).double(), expected, **FP32_TOL)
    assert pool.full_kv_pool.k_buffer[0].isnan().all()


def test_dummy_forwards_of_sglang_are_attended(monkeypatch):
    """It tunes kernels of experts with them, in a layout that has equal windows and no rows of requests."""
    backend = CudaVerifyBackend.__new__(CudaVerifyBackend)
    backend.token_to_kv_pool, backend.req_to_token = Pool(8, torch.float32), torch.zeros(2, 16, dtype=torch.int32)
    phased = PhasedBackend.__new__(PhasedBackend)
    phased.decode_backend = backend
    # What SGLang asks before it asks the backend of decoding.
    settings = SimpleNamespace(dllm=SimpleNamespace(dllm_algorithm=None))
    monkeypatch.setattr(hybrid_attn_backend, "get_exec", lambda: settings)
    context = phased.get_cuda_graph_seq_len_fill_value()
    batch = forward(
        spec_info=DFlashVerifyInput(draft_token=None, positions=None, draft_token_num=4),
        req_pool_indices=torch.zeros(3, dtype=torch.int64),
        seq_lens=torch.full((3,), context),
        out_cache_loc=torch.zeros(12, dtype=torch.int64),
    )
    seen = []

    def attend(q, kv, pool, windows, **how):
        seen.append((windows.indptr.tolist(), windows.width))
        return window_attention_ref(q, kv, pool, windows, **how)

    monkeypatch.setattr(module, "window_attention", attend)
    q, k, v = (torch.randn(12, heads * HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    assert backend.forward_extend(q, k, v, a_layer(), batch).isfinite().all()
    assert seen == [([0, 4, 8, 12], 4)]


@pytest.mark.parametrize(
    ("dtype", "scales"),
    [(torch.float8_e4m3fn, (None, None)), (torch.float8_e4m3fn, (4.0, 0.25)), (torch.float8_e5m2, (4.0, 0.25))],
)
def test_an_eight_bit_cache_is_divided_once_and_read_back(dtype, scales):
    """A row sees of its neighbours what later steps see of them."""
    attended, (q, k, v), backend, windows, slots = verify(dtype, scales)
    pool, factors = backend.token_to_kv_pool, [scale or 1.0 for scale in scales]
    for stored, rows, factor in zip((pool.k, pool.v), (k, v), factors, strict=True):
        assert torch.equal(stored.float()[slots], heads_of(rows / factor).to(dtype).float())
    whole = [stored.float() * factor for stored, factor in zip((pool.k, pool.v), factors, strict=True)]
    rows = tuple(stored[slots] for stored in whole)
    expected = window_attention_ref(heads_of(q), rows, tuple(whole), windows, causal=True, scale=HEAD_DIM**-0.5)
    torch.testing.assert_close(heads_of(attended), expected)


def test_a_cache_that_cannot_be_read_is_refused():
    for dtype in (torch.float16, torch.bfloat16):
        check_pool(dtype, (8, 0))
    check_pool(torch.float8_e4m3fn, (8, 9))
    with pytest.raises(ConfigError, match=r"float8_e4m3fn on a GPU of compute capability 8\.6"):
        check_pool(torch.float8_e4m3fn, (8, 6))
    check_pool(torch.float8_e5m2, (8, 0))
    with pytest.raises(ConfigError, match="K/V cache in uint8; pass"):
        check_pool(torch.uint8, (9, 0))
