"""Tests of prefixes that come back from host memory, and of the drafter's K/V as SGLang moves it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.hybrid_cache import hybrid_pool_assembler
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host import mha
from sglang.srt.runtime_context import get_context
from sglang.srt.speculative import base_spec_worker
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang_objects import GOLDEN, batch, partly, request, table, worker

from sglang_dspark.draft.formats import read_config
from sglang_dspark.draft.model import DraftCache
from sglang_dspark.engine.worker_base import SpecWorkerAdapter
from sglang_dspark.errors import UnservedError
from sglang_dspark.features.host_cache import DraftPool, HostCache
from sglang_dspark.worker.worker import DSparkWorker


def test_a_prompt_waits_for_what_comes_back():
    """DecodeInfo waits for nothing: SGLang has -1 then."""
    awaited = []
    part = HostCache(partly(DSparkWorker, set_hicache_consumer=awaited.append))
    for told in (2, -1):
        part.batch_comes(batch(hicache_consumer_index=told))
    assert awaited == [2, -1]


def test_prefixes_that_may_have_come_back_are_remembered():
    """Their slots held other texts before. That of a request which gets a token with them is known.

    Its last tokens are not on the host yet.
    """
    remembered, rows = [], table(2, 4)
    rows.req_to_token.copy_(torch.arange(12).view(3, 4))
    drafter = SimpleNamespace(remember=lambda *both: remembered.append([one.tolist() for one in both]))
    worker = partly(DSparkWorker, drafter=drafter)
    reqs = [request(prompt=ids) for ids in ([5, 6, 7], [8, 9], [3])]
    for req, row in zip(reqs, (2, 0, 1), strict=True):
        req.kv.req_pool_idx = row
        req.full_untruncated_fill_ids, req.extend_end = req.origin_input_ids, len(req.origin_input_ids)
    HostCache(worker).prefill_done(batch(*reqs, decoding_reqs=reqs[2:], prefix_lens=[2, 0, 4], req_to_token_pool=rows))
    assert remembered == [[[5, 6], [8, 9]]]


@pytest.mark.parametrize("target_layers", [1, 2])
def test_a_drafter_of_more_layers_than_the_target_is_refused(target_layers):
    """SGLang fetches one layer of the drafter with each of the target's."""
    config = replace(read_config(GOLDEN / "vanilla_g7"), num_hidden_layers=2)
    cache = DraftCache(config, 12, torch.bfloat16, torch.device("cpu"))
    worker = partly(DSparkWorker)
    pool = partly(MHATokenToKVPool, layer_num=target_layers)
    allocator = partly(TokenToKVPoolAllocator, size=8, page_size=4, _kvcache=pool)
    HostCache(worker).pools_made(allocator, None)
    assert worker.draft_pool is None
    if target_layers == 2:
        HostCache(worker).pools_made(allocator, cache)
        assert worker.draft_pool.layer_num == 2
    else:
        with pytest.raises(UnservedError, match="drop the flag"):
            HostCache(worker).pools_made(allocator, cache)


LAYERS, HEADS, DIM, SIZE, PAGE = 3, 2, 8, 24, 4
CONFIG = replace(read_config(GOLDEN / "vanilla_g7"), num_hidden_layers=LAYERS, num_key_value_heads=HEADS, head_dim=DIM)


@pytest.fixture
def cache():
    cache = DraftCache(CONFIG, SIZE + PAGE, torch.bfloat16, torch.device("cpu"))
    cache.k.copy_(torch.randn_like(cache.k))
    cache.v.copy_(torch.randn_like(cache.v))
    return cache


def test_the_pool_is_the_memory_of_the_draft_cache(cache):
    pool = DraftPool(cache, SIZE, PAGE)
    assert (pool.size, pool.page_size, pool.layer_num, pool.dtype) == (SIZE, PAGE, LAYERS, torch.bfloat16)
    for layer in range(LAYERS):
        assert pool.get_key_buffer(layer).data_ptr() == cache.k[layer].data_ptr()
        assert pool.get_value_buffer(layer).data_ptr() == cache.v[layer].data_ptr()
    assert pool.k_data_ptrs.tolist() == [layer.data_ptr() for layer in cache.k]
    assert pool.v_data_ptrs.tolist() == [layer.data_ptr() for layer in cache.v]
    assert pool.data_strides.tolist() == [HEADS * DIM * 2] * 2 * LAYERS


def test_a_cache_of_another_size_is_no_pool_of_these_slots(cache):
    with pytest.raises(AssertionError, match="28 rows of draft K/V for 32 slots"):
        DraftPool(cache, SIZE + 8, PAGE)


@pytest.mark.parametrize("switched_on", [True, False])
def test_sglang_plans_to_move_it_with_the_target(cache, switched_on):
    face = SpecWorkerAdapter(worker(spec_algorithm=SpeculativeAlgorithm.NONE))
    with get_context().override_server_args(enable_hierarchical_cache=switched_on):
        face.init_hicache_draft_plan()
        assert face.hicache_draft_plan == base_spec_worker.HiCacheDraftPlan()  # of a server without a drafter
        face.draft_pool = DraftPool(cache, SIZE, PAGE)
        face.init_hicache_draft_plan()
    planned = face.hicache_draft_plan.mode, face.hicache_draft_plan.device_pools
    modes = base_spec_worker.HiCacheDraftMode
    assert planned == ((modes.SIDECAR, (face.draft_pool,)) if switched_on else (modes.NONE, ()))


def beside_target(pool, host_slots):
    """SGLang's own host memory for ``pool``, next to that of a target with so many slots there."""
    target = SimpleNamespace(logical_size=host_slots)
    controller = SimpleNamespace(mem_pool_host=target, page_size=PAGE, transfer_layer_id_max=LAYERS)
    [spec], [entry] = hybrid_pool_assembler.build_hicache_draft_sidecars(
        draft_device_pools=(pool,), tree_cache=SimpleNamespace(cache_controller=controller)
    )
    assert spec.indices_from_pool == hybrid_pool_assembler.PoolName.KV
    assert [entry.layer_mapper(layer) for layer in range(LAYERS)] == list(range(LAYERS))
    return entry.host_pool


def test_rows_come_back_from_host_memory_to_other_slots(cache, monkeypatch):
    """Uses SGLang's own host pool; only the copy between lists of layers, a CUDA kernel, has a stand-in."""

    def transfer(src_layers, dst_layers, src_indices, dst_indices, page_size):
        assert page_size == PAGE
        for source, target in zip(src_layers, dst_layers, strict=True):
            target[dst_indices] = source[src_indices]

    def allocate(dims, dtype, device, **_how):
        return torch.full(dims, torch.nan, dtype=dtype, device=device)

    monkeypatch.setattr(mha, "transfer_kv_direct", transfer, raising=False)
    monkeypatch.setitem(mha.ALLOC_MEMORY_FUNCS, "cpu", allocate)
    monkeypatch.setattr("sglang.srt.mem_cache.pool_host.base.HICACHE_HOST_MEMORY_RESERVE_BYTES", 0)
    pool = DraftPool(cache, SIZE, PAGE)
    with get_context().override_server_args(hicache_mem_layout="layer_first"):
        host = beside_target(pool, host_slots=2 * SIZE)
    assert host.size == 2 * SIZE
    before, on_host, after = torch.arange(4, 12), torch.arange(40, 48), torch.arange(16, 24)
    expected = cache.k[:, before].clone(), cache.v[:, before].clone()
    host.backup_from_device_all_layer(pool, on_host, before, "direct")
    cache.k.zero_()
    cache.v.zero_()
    for layer in range(host.layer_num):
        host.load_to_device_per_layer(pool, on_host, after, layer, "direct")
    assert torch.equal(cache.k[:, after], expected[0])
    assert torch.equal(cache.v[:, after], expected[1])
    assert not cache.k[:, :16].any()
