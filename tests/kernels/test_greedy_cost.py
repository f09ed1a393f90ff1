"""Greedy batches pay for an argmax and nothing else of vocabulary size."""

import pytest
import torch
from dspark_kernels import DraftBlock, DraftHeads, RoundKeys, SamplingBatch, Windows, accept_ref, draft_block_ref, draw
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

BS, GAMMA, VOCAB = 3, 4, 1013


class VocabularySizedResults(TorchFunctionMode):
    """Records every operation that writes a new tensor with at least V elements."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        known = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)}
        for leaf in tree_leaves(result):
            if torch.is_tensor(leaf) and leaf.numel() >= VOCAB and leaf.untyped_storage().data_ptr() not in known:
                self.operations.append(func.__name__)
        return result


def batch(temperature):
    rows = SamplingBatch.from_lists([temperature] * BS, [-1] * BS, [1] * BS, [0] * BS, [None] * BS)
    return rows, RoundKeys(1, 2, torch.arange(BS), torch.arange(BS))


CALLS = {
    "draw": lambda rows, keys: draw(torch.randn(BS, VOCAB), rows, keys),
    "draft_block": lambda rows, keys: draft_block_ref(
        torch.randn(BS, GAMMA, VOCAB),
        torch.randn(BS, GAMMA, 2),
        torch.zeros(BS, dtype=torch.long),
        DraftHeads(),
        rows,
        keys,
    ),
    "accept": lambda rows, keys: accept_ref(
        DraftBlock(torch.zeros(BS, GAMMA, dtype=torch.long)),
        Windows(torch.tensor([4, 0, 2]), torch.tensor([0, 5, 6, 9])),
        torch.randn(9, VOCAB),
        keys.positions,
        rows,
        keys,
    ),
}


def vocabulary_sized_operations(call, temperature):
    with VocabularySizedResults() as seen:
        call(*batch(temperature))
    return [name for name in seen.operations if "randn" not in name]


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_greedy_batches_write_nothing_of_vocabulary_size(call):
    assert vocabulary_sized_operations(call, temperature=0.0) == []


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_recorder_sees_what_sampling_writes(call):
    assert any("softmax" in name for name in vocabulary_sized_operations(call, temperature=1.0))
