"""Flattening of the tokens to be verified."""

from contextlib import nullcontext

import pytest
import torch
from dspark_kernels import RoundKeys, SamplingBatch, kernels_anywhere

from sglang_dspark.step.selection import FixedLens, TopDrafts, build_plan
from sglang_dspark.step.state import DecodeBatch

GAMMA = 3
PREFIXES = [10, 0, 200]
DRAFTS = torch.tensor([[11, 12, 13], [21, 22, 23], [31, 32, 33]])


@pytest.fixture
def step():
    prefix_lens = torch.tensor(PREFIXES)
    requests = torch.tensor([4, 1, 2])
    return DecodeBatch(
        anchors=torch.tensor([10, 20, 30]),
        prefix_lens=prefix_lens,
        req_pool_indices=requests,
        req_to_token=(1000 * torch.arange(5)[:, None] + torch.arange(300)).int(),
        rows=SamplingBatch.from_lists([0.0] * 3, [-1] * 3, [1.0] * 3, [0.0] * 3, [None] * 3),
        keys=RoundKeys(seed=1, step=1, request_keys=requests, positions=prefix_lens + 1),
    )


def ragged_plan(step, lens):
    return build_plan(step.requests, DRAFTS, TopDrafts.of_lengths(torch.tensor(lens), GAMMA))


def rows_of(plan, request):
    start, end = plan.indptr[request], plan.indptr[request + 1]
    return [t[start:end].tolist() for t in (plan.input_ids, plan.positions, plan.slots, plan.columns)]


@pytest.mark.parametrize("lens", [[0, 3, 1], [3, 0, 0], [1, 2, 3], [0, 0, 0]])
def test_ragged(step, lens):
    plan = ragged_plan(step, lens)
    assert plan.width == GAMMA + 1
    assert plan.indptr.tolist() == [0, 1 + lens[0], 2 + lens[0] + lens[1], 3 + sum(lens)]
    for request, verify_len in enumerate(lens):
        ids, positions, slots, columns = rows_of(plan, request)
        assert ids == [10 * (request + 1), *DRAFTS[request, :verify_len].tolist()]
        assert positions == [PREFIXES[request] + j for j in range(verify_len + 1)]
        row = int(step.req_pool_indices[request])
        assert slots == [1000 * row + position for position in positions]
        assert columns == list(range(verify_len + 1))


SURVIVAL = torch.tensor([[0.9, 0.5, 0.1], [2.0, 2.0, -1.0], [0.6, 0.5, 0.4]])
SELECTED = {
    "all": FixedLens(3, 3, torch.device("cpu")),
    "some of each": FixedLens(2, 3, torch.device("cpu")),
    **{f"best {budget}": TopDrafts(SURVIVAL, budget) for budget in (1, 4, 7)},
}


@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SELECTED)
def test_every_selection_is_the_ragged_plan_of_its_lengths(step, name, kernels):
    """On a GPU, here by Triton's interpreter, too. A draft must not be verified, and others have to be."""
    selected = SELECTED[name]
    with kernels_anywhere() if kernels else nullcontext():
        plan = build_plan(step.requests, DRAFTS, selected)
    ragged = ragged_plan(step, selected.verify_lens.tolist())
    for part in ("verify_lens", "indptr", "requests", "columns", "input_ids", "positions", "slots"):
        assert torch.equal(getattr(plan, part), getattr(ragged, part)), part
    assert plan.width == (3 if name == "some of each" else 4)


def test_verifying_nothing_needs_no_drafts(step):
    nothing = FixedLens(0, 3, torch.device("cpu"))
    assert build_plan(step.requests, DRAFTS[:, :0], nothing).input_ids.tolist() == [10, 20, 30]
