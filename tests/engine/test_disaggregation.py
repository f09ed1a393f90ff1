"""Prompts that another server has encoded: the draft K/V that crosses, and the first step after it."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch
from golden_server import DRAFT
from sglang.srt.managers.overlap_utils import resolve_forward_inputs
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from sglang_dspark.draft.cache import DraftCache
from sglang_dspark.draft.resolved import ResolvedDrafter
from sglang_dspark.engine.scheduler.draft_input import DSparkDraftInput
from sglang_dspark.engine.scheduler.draft_pool import DraftPool
from sglang_dspark.engine.startup.registration import _algorithm_class

CONFIG = ResolvedDrafter.read(DRAFT).config


def filled_cache(pages, page_size, seed):
    cache = DraftCache(CONFIG, pages * page_size, torch.float32, torch.device("cpu"))
    for tensor in (cache.k, cache.v):
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)))
    return cache


@pytest.mark.parametrize("page_size", [1, 16])
def test_an_engine_that_copies_pages_by_their_addresses_moves_the_draft_context(page_size):
    """What such an engine does: of each buffer whole pages, from any place of one pool to any place of the other."""
    here, there = filled_cache(8, page_size, seed=1), filled_cache(8, page_size, seed=2)
    before = there.k.clone(), there.v.clone()
    sources, targets = [1, 2, 5], [6, 4, 3]
    lists = [DraftPool(cache, 7 * page_size, page_size).get_contiguous_buf_infos() for cache in (here, there)]
    for (begin, size, item), (far, far_size, far_item) in zip(*(zip(*of, strict=True) for of in lists), strict=True):
        assert (size, item) == (far_size, far_item) and size == 8 * item
        for source, target in zip(sources, targets, strict=True):
            ctypes.memmove(far + target * item, begin + source * item, item)
    for moved, kept, origin in zip((there.k, there.v), before, (here.k, here.v), strict=True):
        by_page = [tensor.unflatten(1, (8, page_size)) for tensor in (moved, kept, origin)]
        for page in range(8):
            expected = by_page[2][:, sources[targets.index(page)]] if page in targets else by_page[1][:, page]
            assert by_page[0][:, page].equal(expected)


def algorithm():
    return _algorithm_class()("DSPARK", factory=lambda args: object, supports_overlap=True)


def test_the_first_step_reads_token_and_length_from_the_relay(monkeypatch):
    """Under overlap the next step knows a request by its row alone."""
    # What SGLang looks up in the arguments of its process, of which there are none here.
    monkeypatch.setattr("sglang.srt.speculative.spec_utils.spec_need_hidden_states", lambda: True)
    spec, rows = algorithm(), torch.tensor([5, 2])
    assert isinstance(spec, CustomSpecAlgo)
    future_map = spec.create_future_map("cpu", ReqToTokenPool(8, 64, "cpu", enable_memory_saver=False))
    batch = SimpleNamespace(
        enable_overlap=True,
        req_pool_indices=rows,
        seq_lens=torch.tensor([17, 40]),
        spec_algorithm=spec,
        prefill_input_ids_cpu=None,
        input_ids=None,
    )
    batch.spec_info = spec.build_disagg_draft_input(batch, torch.tensor([7, 9]), future_map)
    batch.seq_lens = torch.zeros(2, dtype=torch.int64)
    batch.spec_info.bonus_tokens = torch.zeros(2, dtype=torch.int64)
    batch.spec_info.filter_batch(torch.tensor([1]))
    batch.req_pool_indices = rows[1:]
    future_map.resolve_seq_lens_cpu(batch)
    resolve_forward_inputs(batch, future_map)
    assert batch.spec_info.bonus_tokens.tolist() == [9]
    assert batch.seq_lens.tolist() == batch.seq_lens_cpu.tolist() == [40]


def test_without_overlap_the_state_carries_them_itself():
    batch = SimpleNamespace(enable_overlap=False, req_pool_indices=torch.tensor([3]), seq_lens=torch.tensor([17]))
    state = algorithm().build_disagg_draft_input(batch, torch.tensor([7]), None)
    running = DSparkDraftInput(torch.tensor([4]), torch.tensor([30]))
    running.merge_batch(state)
    assert (running.bonus_tokens.tolist(), running.new_seq_lens.tolist()) == ([4, 7], [30, 17])
    assert running.future_indices is None
