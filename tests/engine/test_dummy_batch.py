"""Batches that steps are timed with, before the first request."""

import torch
from sglang.srt.managers.schedule_batch import set_mamba_track_indices_from_reqs
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang_objects import model_config, partly, table, worker

from sglang_dspark.engine.measure_steps import DummyBatch


def test_tokens_differ_between_requests_and_places():
    """Experts are chosen by tokens: if all were alike, a few experts would do for any number of requests."""
    target = worker(device="cpu", model_config=model_config(vocab_size=49_152))
    dummy = DummyBatch(target, requests=64, context=64, window=8)
    tokens = dummy.tokens(8)
    assert tokens.shape == (64, 8)
    assert len(tokens.unique()) == tokens.numel()
    assert 0 <= int(tokens.min()) <= int(tokens.max()) < 49_152
    assert torch.equal(tokens[:, :1], dummy.tokens(1))


def test_its_states_are_padding():
    """Warm-up and step times leave no trace in the states that requests will have, nor in those of the radix cache."""
    requests, rows, pool = 3, table(4, 80), partly(MHATokenToKVPool, size=400)
    rows.enable_mamba_extra_buffer = True
    rows.req_index_to_mamba_ping_pong_track_buffer_mapping = torch.zeros((5, 2), dtype=torch.int64)  # as SGLang's
    known = {"device": "cpu", "model_config": model_config(), "spec_algorithm": None}
    target = worker(**known, req_to_token_pool=rows, token_to_kv_pool=pool)
    with DummyBatch(target, requests, context=64, window=8) as dummy:
        batch = dummy.fresh()
    set_mamba_track_indices_from_reqs(batch)
    assert batch.mamba_track_indices.tolist() == [0] * requests
    rows.enable_mamba_extra_buffer = False
    assert dummy.fresh().reqs == []


def test_slots_have_rows_in_a_pool_of_windows():
    """Each another one, as far as there are some; nothing of it stays."""
    pool, rows = partly(SWAKVPool, size=50, size_swa=20), table(3, 30)
    translation = torch.cat([torch.zeros(51, dtype=torch.int64), torch.tensor([-1])])
    pool.register_mapping(translation)
    target = worker(device="cpu", token_to_kv_pool=pool, req_to_token_pool=rows)
    with DummyBatch(target, requests=2, context=10, window=4):
        found = translation[rows.req_to_token[:2, :14].long()]
        assert len(found.unique()) == 20 and int(found.min()) == 1 and int(found.max()) == 20
    assert translation.tolist() == [0] * 51 + [-1]
