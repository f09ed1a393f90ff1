"""Batches that steps are timed with, before the first request."""

from types import SimpleNamespace

import torch

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
