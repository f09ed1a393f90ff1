"""On an accelerator nothing is read back: meta tensors have no values, so any attempt to read one raises."""

import pytest
import torch
from dspark_kernels import (
    AcceptResult,
    DraftBlock,
    DraftHeads,
    RoundKeys,
    SamplingBatch,
    Windows,
    accept_ref,
    draft_block_ref,
    draw,
    simulated_accept,
)

BS, GAMMA, VOCAB = 6, 4, 9000
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


def floats(*shape):
    return torch.empty(shape, device="meta")


def ints(*shape):
    return torch.empty(shape, device="meta", dtype=torch.int64)


@pytest.fixture(params=BATCHES.values(), ids=BATCHES)
def batch(request):
    rows = SamplingBatch.from_lists(*(list(column) for column in zip(*request.param, strict=True)), device="meta")
    return rows, RoundKeys(1, ints(), ints(BS), ints(BS))


def test_drawing_reads_nothing_back(batch):
    assert draw(floats(BS, VOCAB), *batch).shape == (BS,)


def test_drafting_reads_nothing_back(batch):
    block = draft_block_ref(floats(BS, GAMMA, VOCAB), floats(BS, GAMMA, 2), ints(BS), DraftHeads(), *batch)
    assert block.tokens.shape == (BS, GAMMA)


@pytest.mark.parametrize("gamma", [GAMMA, 0])
def test_accepting_reads_nothing_back(batch, gamma):
    block = DraftBlock(ints(BS, gamma), floats(BS, gamma, VOCAB), copied=floats(BS, gamma) > 0)
    accepted = accept_ref(block, Windows(ints(BS), ints(BS + 1)), floats(17, VOCAB), ints(BS), *batch)
    assert accepted.out_tokens.shape == (BS, gamma + 1)


def test_simulating_reads_nothing_back():
    judged = AcceptResult(ints(BS), ints(BS), ints(BS, GAMMA + 1), ints(BS))
    accepted = simulated_accept(judged, ints(BS, GAMMA), ints(BS), floats(GAMMA).double())
    assert accepted.out_tokens.shape == (BS, GAMMA + 1)


def test_reading_back_would_raise():
    with pytest.raises((RuntimeError, NotImplementedError)):
        bool(floats(1)[0] > 0)
    with pytest.raises((RuntimeError, NotImplementedError)):
        floats(3).nonzero()
