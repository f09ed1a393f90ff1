"""Laying out a decode step: the kernel and its torch form against one request at a time."""

import pytest
import torch
from dspark_kernels import PlanNumbers, PreparedStep, StepRequests, prepare, prepare_ref

MASK = 77
FIELDS = PreparedStep.__dataclass_fields__


def step_case(bs, device, index_dtype=torch.int64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    num_rows = bs + 4
    return StepRequests(
        anchors=torch.randint(0, 50, (bs,), generator=generator).to(device),
        prefix_lens=torch.randint(0, 60, (bs,), generator=generator).to(device, index_dtype),
        req_pool_indices=torch.randperm(num_rows, generator=generator)[:bs].to(device, index_dtype),
        req_to_token=torch.zeros((num_rows, 1), dtype=torch.int32, device=device),
    )


@pytest.mark.parametrize("bs", [1, 3, 17, 130])
@pytest.mark.parametrize("gamma", [1, 5, 7, 16])
def test_both_forms_lay_out_every_request(bs, gamma, device):
    requests = step_case(bs, device, torch.int32 if bs == 3 else torch.int64)
    step = list(zip(requests.anchors.tolist(), requests.prefix_lens.tolist(), strict=True))
    expected = PreparedStep(
        block_ids=torch.tensor([[anchor] + [MASK] * (gamma - 1) for anchor, _ in step], device=device),
        positions=torch.tensor([list(range(prefix, prefix + gamma)) for _, prefix in step], device=device),
        anchors=requests.anchors,
        prefix_lens=requests.prefix_lens.to(torch.int64),
        req_pool_indices=requests.req_pool_indices.to(torch.int64),
        num_requests=torch.tensor([bs], device=device),
        numbers=torch.tensor([0, -1, -1], device=device),
    )
    for form in (prepare, prepare_ref):
        assert_same(form(requests, gamma, MASK), expected)


@pytest.mark.parametrize(("bs", "num_slots"), [(1, 1), (3, 8), (17, 40), (40, 40)])
def test_buffers_of_a_graph_are_padded(bs, num_slots, device):
    gamma = 5
    requests = step_case(bs, device)
    outs = [poisoned(num_slots, gamma, device) for _ in range(2)]
    for form, out in zip((prepare, prepare_ref), outs, strict=True):
        assert form(requests, gamma, MASK, out, PlanNumbers(9, -1, 2)) is out
    assert_same(*outs)
    padded = outs[0]
    for name in ("anchors", "prefix_lens", "req_pool_indices"):
        assert not getattr(padded, name)[bs:].any()
    assert (padded.block_ids[bs:] == MASK).all()
    assert padded.num_requests.item() == bs
    assert padded.numbers.tolist() == [9, -1, 2]
    assert len(padded.requests(requests.req_to_token)) == num_slots


def poisoned(num_slots, gamma, device):
    out = PreparedStep.empty(num_slots, gamma, device)
    for name in FIELDS:
        getattr(out, name).fill_(-1)
    return out


def assert_same(kernel, reference):
    for name in FIELDS:
        ours, theirs = getattr(kernel, name), getattr(reference, name)
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), name
