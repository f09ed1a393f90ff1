"""Prefixes from host memory: prompts wait for them, and drafts are looked up in their texts."""

from array import array
from types import SimpleNamespace

import pytest
import torch

from sglang_dspark.draft.cache import DraftCache
from sglang_dspark.errors import UnservedError
from sglang_dspark.features.host_cache.served import HostCache


def test_a_prompt_waits_for_what_comes_back():
    """Decoding waits for nothing: SGLang has -1 then."""
    awaited = []
    part = HostCache(SimpleNamespace(set_hicache_consumer=awaited.append))
    for told in (2, -1):
        part.batch_comes(SimpleNamespace(hicache_consumer_index=told))
    assert awaited == [2, -1]


def test_prefixes_that_may_have_come_back_are_remembered():
    """Their slots held other texts before."""
    remembered = []
    worker = SimpleNamespace(
        remember=lambda tokens, slots: remembered.append((tokens.tolist(), slots.tolist())), device=torch.device("cpu")
    )
    reqs = [
        SimpleNamespace(get_fill_ids=lambda ids=ids: array("q", ids), kv=SimpleNamespace(req_pool_idx=row))
        for row, ids in ((2, [5, 6, 7]), (0, [8, 9]))
    ]
    table = torch.arange(12, dtype=torch.int32).view(3, 4)
    batch = SimpleNamespace(reqs=reqs, prefix_lens=[2, 0], req_to_token_pool=SimpleNamespace(req_to_token=table))
    HostCache(worker).prefill_done(batch)
    assert remembered == [([5, 6], [8, 9])]


@pytest.mark.parametrize("target_layers", [1, 2])
def test_a_drafter_of_more_layers_than_the_target_is_refused(target_layers):
    """SGLang fetches one layer of the drafter with each of the target's."""
    config = SimpleNamespace(num_hidden_layers=2, num_key_value_heads=1, head_dim=8)
    cache = DraftCache(config, 12, torch.bfloat16, torch.device("cpu"))
    worker = SimpleNamespace(draft_pool=None)
    pool = SimpleNamespace(layer_num=target_layers)
    allocator = SimpleNamespace(size_full=8, page_size=4, get_kvcache=lambda: pool)
    HostCache(worker).pools_made(allocator, None)
    assert worker.draft_pool is None
    if target_layers == 2:
        HostCache(worker).pools_made(allocator, cache)
        assert worker.draft_pool.layer_num == 2
    else:
        with pytest.raises(UnservedError, match="drop the flag"):
            HostCache(worker).pools_made(allocator, cache)
