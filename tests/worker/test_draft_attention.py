"""Attention of draft blocks over the paged cache, as a CPU and as a GPU compute it, against an explicit mask."""

from types import SimpleNamespace

import pytest
import torch

from sglang_dspark.draft.reference import attend_dense, block_mask
from sglang_dspark.draft.visibility import Visibility
from sglang_dspark.worker.draft_attention import attend_on_cpu, attend_on_gpu

SLOTS, HEADS, KV_HEADS, HEAD_DIM = 4, 6, 2, 16
PREFIXES = (0, 1, 7, 24, 30)
SCALE = 0.3
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on the CPU Triton's interpreter runs the kernels

KINDS = {
    "full": Visibility(),
    "causal": Visibility(causal=True),
    "window from the anchor": Visibility(window=7, from_anchor=True),
    "window from the anchor, causal": Visibility(window=1, from_anchor=True, causal=True),
    "window wider than any context": Visibility(window=200, from_anchor=True),
    "window from the slot": Visibility(window=7),
    "window from the slot, causal": Visibility(window=3, causal=True),
    "window of one": Visibility(window=1, causal=True),
}


class Step(SimpleNamespace):
    def __len__(self):
        return len(PREFIXES)


def step_of(device):
    """Five requests whose rows lie anywhere, in a table whose last columns some of them reach."""
    generator = torch.Generator().manual_seed(3)
    table = torch.randperm(8 * 30, generator=generator, dtype=torch.int32).view(8, 30) + 1
    return Step(
        req_to_token=table.to(device),
        req_pool_indices=torch.tensor([6, 0, 3, 5, 1], device=device),
        prefix_lens=torch.tensor(PREFIXES, device=device),
        anchors=torch.zeros(len(PREFIXES), dtype=torch.int64, device=device),
    )


@pytest.mark.parametrize("make", [attend_on_cpu, attend_on_gpu])
@pytest.mark.parametrize("visibility", KINDS.values(), ids=KINDS.keys())
def test_blocks_see_what_their_layer_shows(make, visibility):
    if make is attend_on_gpu and visibility.slides:
        with pytest.raises(AssertionError, match="refused at start-up"):
            make(None, None, SLOTS, None, visibility)
        return
    device = DEVICE if make is attend_on_gpu else "cpu"
    step = step_of(device)
    generator = torch.Generator().manual_seed(1)
    cache = SimpleNamespace(
        k=torch.randn(1, 241, KV_HEADS, HEAD_DIM, generator=generator).to(device),
        v=torch.randn(1, 241, KV_HEADS, HEAD_DIM, generator=generator).to(device),
    )
    rows = len(PREFIXES) * SLOTS
    q = torch.randn(rows, HEADS, HEAD_DIM, generator=generator).to(device)
    k, v = (torch.randn(rows, KV_HEADS, HEAD_DIM, generator=generator).to(device) for _ in range(2))
    config = SimpleNamespace(num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, attention_scale=SCALE)
    found = make(cache, step, SLOTS, config, visibility)(0, q, k, v)
    for request, prefix in enumerate(PREFIXES):
        own = slice(request * SLOTS, (request + 1) * SLOTS)
        places = step.req_to_token[step.req_pool_indices[request], :prefix].long()
        keys, values = torch.cat((cache.k[0, places], k[own])), torch.cat((cache.v[0, places], v[own]))
        seen = block_mask(visibility, prefix, SLOTS).to(device)
        expected = attend_dense(q[own], keys, values, scale=SCALE, seen=seen)
        torch.testing.assert_close(found[own], expected, atol=1e-5, rtol=0)
