"""Prefixes from host memory: prompts wait for them, and drafts are looked up in their texts."""

from dataclasses import replace

import pytest
import torch
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang_objects import GOLDEN, batch, partly, request, table

from sglang_dspark.draft.formats import read_config
from sglang_dspark.draft.model import DraftCache
from sglang_dspark.errors import UnservedError
from sglang_dspark.features.host_cache import HostCache
from sglang_dspark.worker.worker import DSparkWorker


def test_a_prompt_waits_for_what_comes_back():
    """Decoding waits for nothing: SGLang has -1 then."""
    awaited = []
    part = HostCache(partly(DSparkWorker, set_hicache_consumer=awaited.append))
    for told in (2, -1):
        part.batch_comes(batch(hicache_consumer_index=told))
    assert awaited == [2, -1]


def test_prefixes_that_may_have_come_back_are_remembered():
    """Their slots held other texts before. That of a request which gets a token beside them is known.

    Its last tokens are not on the host yet.
    """
    remembered, rows = [], table(2, 4)
    rows.req_to_token.copy_(torch.arange(12).view(3, 4))
    worker = partly(DSparkWorker, remember=lambda *both: remembered.append([one.tolist() for one in both]))
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
