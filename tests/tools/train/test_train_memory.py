"""Memory of a training run, against what a step really keeps."""

from dataclasses import replace

import pytest
import torch
from transformers import Qwen3Config

from sglang_dspark.tools.train import pipeline
from sglang_dspark.tools.train.config import TrainConfig
from sglang_dspark.tools.train.memory import training_bytes
from sglang_dspark.tools.train.rows import CorpusRow, kept_bytes
from sglang_dspark.tools.train.trainer import Trainer


def kept_for_backward(trainer: Trainer) -> int:
    """Bytes that autograd keeps of one step, counted once per memory."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        trainer.run(until=1)
    return sum(kept.values())


def test_the_estimate_covers_what_a_step_keeps_and_is_no_larger_than_a_few_times_that(target, corpus, config, tmp_path):
    wide = replace(config, checkpoint_every=100)
    trainer = Trainer(wide, target, corpus, corpus, tmp_path)
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    longest = max(len(row.input_ids) for row in corpus.rows)
    needed = kept_for_backward(trainer) + 16 * parameters  # weights, gradients and moments in float32
    estimate = training_bytes(wide, target.config, longest)
    assert needed <= estimate <= 3 * needed


def test_a_production_target_needs_what_was_worked_out_by_hand():
    """Qwen3-8B, five taps and layers: some 18 GB of weights and moments, and 7 to 20 GB of activations."""
    target = Qwen3Config(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
    )
    config = TrainConfig(
        target_layer_ids=(1, 9, 17, 25, 33), mask_token_id=2, num_layers=5, markov_rank=256, loss_vocab=8192
    )
    assert 26e9 < training_bytes(config, target, 1536) < 48e9


@pytest.mark.parametrize(("texts", "fits"), [(20, True), (60, False)])
def test_states_leave_room_for_training(target, config, monkeypatch, texts, fits):
    """Texts whose states take half of the free memory were kept, although the optimizer needs most of it."""
    rows = [CorpusRow(torch.zeros(101, dtype=torch.long), 5)] * texts
    needed = training_bytes(config, target.config, 101)
    free = int(1.2 * needed)
    if not fits:
        assert kept_bytes(target, rows) < 0.5 * free
    monkeypatch.setattr(type(target), "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    assert pipeline._fit_with_states(config, target, rows) == fits
