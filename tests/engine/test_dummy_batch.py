"""Batches that steps are timed with, before the first request."""

from types import SimpleNamespace

import torch
from sglang.srt.managers.schedule_batch import set_mamba_track_indices_from_reqs
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from sglang_dspark.engine.scheduler.dummy_batch import DummyBatch


def test_tokens_differ_between_requests_and_places():
    """Experts are chosen by tokens: if all were alike, a few experts would do for any number of requests."""
    runner = SimpleNamespace(device="cpu", model_config=SimpleNamespace(vocab_size=49_152))
    dummy = DummyBatch(SimpleNamespace(model_runner=runner), requests=64, context=64, window=8)
    tokens = dummy.tokens(8)
    assert tokens.shape == (64, 8)
    assert len(tokens.unique()) == tokens.numel()
    assert 0 <= int(tokens.min()) <= int(tokens.max()) < 49_152
    assert torch.equal(tokens[:, :1], dummy.tokens(1))


def test_its_states_are_padding():
    """Warm-up and step times leave no trace in the states that requests will have, nor in those of the radix cache."""
    requests = 3
    pool = SimpleNamespace(
        req_to_token=torch.zeros((5, 80), dtype=torch.int32),
        enable_mamba_extra_buffer=True,
        req_index_to_mamba_ping_pong_track_buffer_mapping=torch.zeros((5, 2), dtype=torch.int64),  # as SGLang makes it
    )
    runner = SimpleNamespace(
        device="cpu",
        model_config=SimpleNamespace(vocab_size=49_152),
        req_to_token_pool=pool,
        token_to_kv_pool=SimpleNamespace(size=400),
        spec_algorithm=None,
    )
    with DummyBatch(SimpleNamespace(model_runner=runner), requests, context=64, window=8) as dummy:
        batch = dummy.fresh()
    set_mamba_track_indices_from_reqs(batch)
    assert batch.mamba_track_indices.tolist() == [0] * requests
    pool.enable_mamba_extra_buffer = False
    assert dummy.fresh().reqs == []


def test_slots_have_rows_in_a_pool_of_windows():
    """Each another one, as far as there are some; nothing of it stays."""
    pool = SWAKVPool.__new__(SWAKVPool)
    pool.size, pool.size_swa = 50, 20
    translation = torch.cat([torch.zeros(51, dtype=torch.int64), torch.tensor([-1])])
    pool.register_mapping(translation)
    table = SimpleNamespace(req_to_token=torch.zeros((4, 30), dtype=torch.int32))
    runner = SimpleNamespace(device="cpu", token_to_kv_pool=pool, req_to_token_pool=table)
    with DummyBatch(SimpleNamespace(model_runner=runner), requests=2, context=10, window=4):
        rows = translation[table.req_to_token[:2, :14].long()]
        assert len(rows.unique()) == 20 and int(rows.min()) == 1 and int(rows.max()) == 20
    assert translation.tolist() == [0] * 51 + [-1]
