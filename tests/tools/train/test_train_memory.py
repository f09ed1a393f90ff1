"""Memory of a training run, against what a step really keeps."""

import weakref
from dataclasses import replace

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Qwen3Config

from sglang_dspark.tools.train import attention, memory, pipeline
from sglang_dspark.tools.train.config import TrainConfig
from sglang_dspark.tools.train.memory import training_bytes
from sglang_dspark.tools.train.rows import CorpusRow, kept_bytes
from sglang_dspark.tools.train.trainer import Trainer


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that operations made and that are still there, and their peak."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._seen = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(output):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage not in self._seen:
                self._seen.add(storage)
                self._count(storage.nbytes())
                weakref.finalize(storage, self._count, -storage.nbytes())
        return output

    def _count(self, num_bytes):
        self.now += num_bytes
        self.peak = max(self.peak, self.now)


def peak_of_a_step(trainer):
    """Of one step, the weights included."""
    weights = sum(p.numel() * p.element_size() for p in trainer.model.parameters())
    with LiveBytes() as live:
        trainer._train_step()
    return weights + live.peak


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("anchors", "pieces", "chunk"), [(16, None, 2**24), (19, 3, 2**24), (19, None, 5000)])
def test_the_estimate_covers_a_step_and_is_no_larger_than_a_few_times_that(
    anchors, pieces, chunk, dtype, target, corpus, config, tmp_path, monkeypatch
):
    for module in (memory, attention):
        monkeypatch.setattr(module, "CHUNK_SCORES", chunk)
    config = replace(config, anchors_per_row=anchors, micro_batch_rows=pieces, compute_dtype=dtype)
    trainer = Trainer(config, target, corpus, corpus, tmp_path)
    longest = max(len(row.input_ids) for row in corpus.rows)
    peak, estimate = peak_of_a_step(trainer), training_bytes(config, target.config, longest).total
    assert peak <= estimate <= 3 * peak


def test_attention_does_not_grow_with_the_square_of_the_text(target, config):
    """Ten times the tokens are ten times the context and the scores of a chunk, and nothing else."""
    config = replace(config, anchors_per_row=512, batch_rows=1)
    short, long = (training_bytes(config, target.config, tokens) for tokens in (1000, 10_000))
    assert short.parameters == long.parameters
    assert long.activations < 10 * short.activations
    assert long.transient <= 2**24 * 16 + short.transient


QWEN3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}
DEEPSPEC = {"target_layer_ids": (1, 9, 17, 25, 33), "mask_token_id": 2, "num_layers": 5, "device": "cuda"}


def test_512_anchors_of_a_production_target_fit_80_gb():
    """DeepSpec's step for Qwen3-8B, with the target beside it: texts of 4096 tokens, 16 of them, two at a time."""
    target_config = Qwen3Config(**QWEN3_8B, tie_word_embeddings=False)
    with torch.device("meta"):
        target = sum(p.numel() for p in AutoModelForCausalLM.from_config(target_config).parameters()) * 2
    config = TrainConfig(**DEEPSPEC, anchors_per_row=512, batch_rows=16, micro_batch_rows=2)
    needed = training_bytes(config, target_config, 4096)
    assert needed.parameters == pytest.approx(1.1264e9 * 18, rel=1e-3)  # as many parameters as DeepSpec's have
    assert target + needed.total < 80e9
    # The scores of one layer, which nothing holds, would not fit beside that.
    scores = 2 * 512 * 7 * 32 * (4096 + 7)
    assert target + needed.total + 5 * 9 * scores > 80e9


def test_two_processes_hold_a_piece_of_a_step_each(target, config):
    """Six texts are four pieces, of two texts at most."""
    alone, shared = (training_bytes(config, target.config, 26, processes) for processes in (1, 2))
    assert shared.activations * 3 == alone.activations


@pytest.mark.parametrize(("texts", "fits"), [(20, True), (60, False)])
def test_states_leave_room_for_training(target, config, monkeypatch, texts, fits):
    """Texts whose states take half of the free memory were kept, although the optimizer needs most of it."""
    rows = [CorpusRow(torch.zeros(101, dtype=torch.long), 5)] * texts
    needed = training_bytes(config, target.config, 101).total
    free = int(1.2 * needed)
    if not fits:
        assert kept_bytes(target, rows) < 0.5 * free
    monkeypatch.setattr(type(target), "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    assert pipeline._fit_with_states(config, target, rows) == fits
