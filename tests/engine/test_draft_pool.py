"""The drafter's K/V as SGLang's features for draft pools see it."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache import kv_cache_builder, memory_pool_host

from sglang_dspark.draft.cache import DraftCache
from sglang_dspark.engine.scheduler.draft_pool import DraftPool
from sglang_dspark.engine.startup import host_cache
from sglang_dspark.engine.startup.host_cache import host_cache_refusals

LAYERS, HEADS, DIM, SIZE, PAGE = 3, 2, 8, 24, 4
SERVED = pytest.mark.skipif(not host_cache.TAKES_DRAFT_POOL, reason="refused on this release")
CONFIG = SimpleNamespace(num_hidden_layers=LAYERS, num_key_value_heads=HEADS, head_dim=DIM)


@pytest.fixture
def cache():
    cache = DraftCache(CONFIG, SIZE + PAGE, torch.bfloat16, torch.device("cpu"))
    cache.k.copy_(torch.randn_like(cache.k))
    cache.v.copy_(torch.randn_like(cache.v))
    return cache


def test_it_is_the_memory_of_the_cache(cache):
    pool = DraftPool(cache, SIZE, PAGE)
    assert (pool.size, pool.page_size, pool.layer_num, pool.dtype) == (SIZE, PAGE, LAYERS, torch.bfloat16)
    for layer in range(LAYERS):
        assert pool.get_key_buffer(layer).data_ptr() == cache.k[layer].data_ptr()
        assert pool.get_value_buffer(layer).data_ptr() == cache.v[layer].data_ptr()
    assert pool.k_data_ptrs.tolist() == [layer.data_ptr() for layer in cache.k]
    assert pool.v_data_ptrs.tolist() == [layer.data_ptr() for layer in cache.v]
    assert pool.data_strides.tolist() == [HEADS * DIM * 2] * 2 * LAYERS


@SERVED
def test_buffers_that_another_server_reads(cache):
    """Of PD disaggregation: addresses, bytes and bytes of a page, keys of all layers before values."""
    addresses, lengths, items = DraftPool(cache, SIZE, PAGE).get_contiguous_buf_infos()
    assert addresses == [layer.data_ptr() for layer in [*cache.k, *cache.v]]
    assert lengths == [(SIZE + PAGE) * HEADS * DIM * 2] * 2 * LAYERS
    assert items == [PAGE * HEADS * DIM * 2] * 2 * LAYERS


def test_a_cache_of_another_size_is_no_pool_of_these_slots(cache):
    with pytest.raises(AssertionError, match="28 rows of draft K/V for 32 slots"):
        DraftPool(cache, SIZE + 8, PAGE)


class Controller:
    """The part of SGLang's ``HiCacheController`` that is told of a draft pool."""

    def __init__(self, host_slots):
        self.mem_pool_host = SimpleNamespace(size=host_slots)

    def set_draft_kv_pool(self, device_pool, host_pool):
        self.device, self.host = device_pool, host_pool


def registered(pool, host_slots):
    """SGLang's own registration of ``pool`` beside a target's whose host memory has so many slots."""
    controller = Controller(host_slots)
    kv_cache_builder.maybe_register_hicache_draft(
        tree_cache=SimpleNamespace(cache_controller=controller),
        draft_worker=SimpleNamespace(draft_worker=SimpleNamespace(draft_runner=SimpleNamespace(token_to_kv_pool=pool))),
        spec_algorithm=SimpleNamespace(is_ngram=lambda: False),
        server_args=SimpleNamespace(
            enable_multi_layer_eagle=False, hicache_mem_layout="layer_first", hicache_storage_backend=None
        ),
        enable_hierarchical_cache=True,
        page_size=PAGE,
    )
    return controller


@SERVED
def test_rows_come_back_from_host_memory_to_other_slots(cache, monkeypatch):
    """By SGLang's own host pool; only the copy between lists of layers is written down here, which is a CUDA kernel."""

    def transfer(src_layers, dst_layers, src_indices, dst_indices, page_size):
        assert page_size == PAGE
        for source, target in zip(src_layers, dst_layers, strict=True):
            target[dst_indices] = source[src_indices]

    def allocate(dims, dtype, device, pin_memory, allocator):
        return torch.full(dims, torch.nan, dtype=dtype, device=device)

    monkeypatch.setattr(memory_pool_host, "transfer_kv_direct", transfer, raising=False)
    monkeypatch.setitem(memory_pool_host.ALLOC_MEMORY_FUNCS, "cpu", allocate)
    monkeypatch.setattr("sglang.srt.mem_cache.pool_host.base.HICACHE_HOST_MEMORY_RESERVE_BYTES", 0)
    pool = DraftPool(cache, SIZE, PAGE)
    controller = registered(pool, host_slots=2 * SIZE)
    assert controller.device is pool and controller.host.size >= 2 * SIZE
    before, on_host, after = torch.arange(4, 12), torch.arange(40, 48), torch.arange(16, 24)
    expected = cache.k[:, before].clone(), cache.v[:, before].clone()
    controller.host.backup_from_device_all_layer(pool, on_host, before, "direct")
    cache.k.zero_()
    cache.v.zero_()
    for layer in range(controller.host.layer_num):
        controller.host.load_to_device_per_layer(pool, on_host, after, layer, "direct")
    assert torch.equal(cache.k[:, after], expected[0])
    assert torch.equal(cache.v[:, after], expected[1])
    assert not cache.k[:, :16].any()


def test_the_host_cache_is_refused_where_it_cannot_be_had(monkeypatch):
    args = SimpleNamespace(enable_hierarchical_cache=True, device="cpu")
    monkeypatch.setattr(host_cache, "TAKES_DRAFT_POOL", True)
    monkeypatch.setattr(memory_pool_host, "transfer_kv_direct", None, raising=False)
    assert list(host_cache_refusals(args)) == []
    monkeypatch.delattr(memory_pool_host, "transfer_kv_direct")
    assert "on cpu: SGLang copies K/V to host memory with CUDA kernels" in next(host_cache_refusals(args))
    monkeypatch.setattr(host_cache, "TAKES_DRAFT_POOL", False)
    assert "lays draft K/V out in another way" in next(host_cache_refusals(args))
    assert list(host_cache_refusals(SimpleNamespace(enable_hierarchical_cache=False))) == []
