"""Steps in torch read nothing back from an accelerator, and greedy ones pay for an argmax alone.

Tensors of the device "meta" have no values, so any attempt to read one raises.
"""

import math

import pytest
import torch
from dspark_kernels import (
    QUANTILES,
    DraftBlock,
    DraftDistribution,
    DraftHeads,
    RoundKeys,
    SamplingBatch,
    SimulatedDraws,
    Windows,
    accept_ref,
    draft_block_ref,
    draw,
    simulated_accept_ref,
)
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

BS, GAMMA, VOCAB = 6, 4, 9001
GREEDY, PLAIN, SEEDED = (0.0, -1, 1.0, 0.0, None), (1.0, -1, 1.0, 0.0, None), (0.8, -1, 0.9, 0.1, 5)
NUCLEUS, TOP_K = (1.0, -1, 0.9, 0.0, None), (1.0, 20, 0.9, 0.0, None)
BATCHES = {
    "greedy": [GREEDY] * BS,
    "plain": [PLAIN] * BS,
    "nucleus": [NUCLEUS] * BS,
    "seeded": [SEEDED] * BS,
    "mixed": [GREEDY, PLAIN, SEEDED, NUCLEUS, TOP_K, GREEDY],
    "few-sampled": [GREEDY, GREEDY, GREEDY, GREEDY, TOP_K, GREEDY],
}


class Step:
    """Calls on a batch with these rules, whose tensors are there before they are called."""

    def __init__(self, rules, device):
        def floats(*shape):
            return torch.zeros(shape, device=device)

        def ints(*shape):
            return torch.zeros(shape, device=device, dtype=torch.int64)

        columns = (list(column) for column in zip(*rules, strict=True))
        self.batch = SamplingBatch.from_lists(*columns, device=device), RoundKeys(1, ints(), ints(BS), ints(BS))
        lens, indptr = ints(BS) + GAMMA, torch.arange(BS + 1, device=device) * (GAMMA + 1)
        distribution = DraftDistribution(floats(BS, GAMMA, VOCAB), floats(BS, GAMMA) + math.log(VOCAB))
        block = DraftBlock(ints(BS, GAMMA), distribution=distribution, copied=floats(BS, GAMMA) > 0)
        empty = DraftBlock(ints(BS, 0), copied=floats(BS, 0) > 0)
        of_drafts = floats(BS, GAMMA, VOCAB), floats(BS, GAMMA, 2), ints(BS), DraftHeads()
        windows, nothing, logits = Windows(lens, indptr), Windows(ints(BS), indptr), floats(BS * (GAMMA + 1), VOCAB)
        draws = SimulatedDraws(ints(BS), floats(GAMMA, QUANTILES))
        self.calls = {
            "draw": lambda: draw(logits[:BS], *self.batch),
            "draft": lambda: draft_block_ref(*of_drafts, *self.batch).tokens,
            "accept": lambda: accept_ref(block, windows, logits, lens, *self.batch).out_tokens,
            "accept nothing": lambda: accept_ref(empty, nothing, logits, lens, *self.batch).out_tokens,
            "simulate": lambda: simulated_accept_ref(draws, ints(BS), lens, ints(BS, GAMMA), lens, lens).out_tokens,
        }


@pytest.mark.parametrize("rules", BATCHES.values(), ids=BATCHES)
def test_nothing_is_read_back(rules):
    shapes = {name: tuple(call().shape) for name, call in Step(rules, "meta").calls.items()}
    whole = (BS, GAMMA + 1)
    assert shapes == {
        "draw": (BS,),
        "draft": (BS, GAMMA),
        "accept": whole,
        "accept nothing": (BS, 1),
        "simulate": whole,
    }
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.empty(3, device="meta").nonzero()


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


@pytest.mark.parametrize("name", ["draw", "draft", "accept"])
def test_greedy_batches_write_nothing_of_vocabulary_size(name):
    for rule, writes in ((GREEDY, False), (PLAIN, True)):
        call = Step([rule] * BS, "cpu").calls[name]
        with VocabularySizedResults() as seen:
            call()
        assert bool(seen.operations) == writes, seen.operations
