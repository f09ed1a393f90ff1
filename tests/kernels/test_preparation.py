"""Laying out a decode step: the kernel and its torch form against one request at a time."""

import pytest
import torch
from dspark_kernels import PlanNumbers, PreparedStep, StepRequests, prepare, prepare_ref
from pairwise import pairwise

MASK = 77


@pytest.mark.parametrize(
    ("sizes", "gamma", "form"),
    pairwise([(1, 1), (3, 3), (3, 8), (17, 40), (130, 130)], [1, 5, 7, 16], [prepare, prepare_ref]),
)
def test_every_request_is_laid_out_and_slots_without_one_are_padded(sizes, gamma, form, device):
    bs, num_slots = sizes
    generator, spare = torch.Generator().manual_seed(0), num_slots - bs
    anchors, prefixes = (torch.randint(0, 60, (bs,), generator=generator) for _ in range(2))
    pool_rows = torch.randperm(bs + 4, generator=generator)[:bs]
    narrow = torch.int32 if bs == 3 else torch.int64
    columns = anchors.to(device), prefixes.to(device, narrow), pool_rows.to(device, narrow)
    requests = StepRequests(*columns, torch.zeros((bs + 4, 1), dtype=torch.int32, device=device))
    out = PreparedStep.empty(num_slots, gamma, device)
    for buffer in vars(out).values():
        buffer.fill_(-1)
    found = form(requests, gamma, MASK, out, PlanNumbers(9, -1, 2)) if spare else form(requests, gamma, MASK)
    assert (found is out) == (spare > 0) and len(found.requests(requests.req_to_token)) == num_slots
    padded = [torch.nn.functional.pad(column, (0, spare)) for column in (anchors, prefixes, pool_rows)]
    expected = PreparedStep(
        torch.tensor([[anchor] + [MASK] * (gamma - 1) for anchor in anchors.tolist()] + [[MASK] * gamma] * spare),
        torch.tensor([list(range(prefix, prefix + gamma)) for prefix in padded[1].tolist()]),
        *padded,
        torch.tensor([bs]),
        torch.tensor([9, -1, 2] if spare else [0, -1, -1]),
    )
    for name, values in vars(expected).items():
        assert getattr(found, name).dtype == values.dtype and torch.equal(getattr(found, name).cpu(), values), name
