"""Attention of draft blocks over the paged cache, as a CPU and as a GPU compute it, against an explicit mask."""

import pytest
import torch
from dspark_kernels import StepRequests, block_attention
from reference_decoding import attend_dense, block_mask

from sglang_dspark.draft.backbone import DraftWindow
from sglang_dspark.draft.config import Visibility
from sglang_dspark.worker.draft_attention import partial_attention

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


def step_of(device):
    """Five requests whose rows lie anywhere, in a table whose last columns some of them reach."""
    generator = torch.Generator().manual_seed(3)
    table = torch.randperm(8 * 30, generator=generator, dtype=torch.int32).view(8, 30) + 1
    return StepRequests(
        anchors=torch.zeros(len(PREFIXES), dtype=torch.int64, device=device),
        prefix_lens=torch.tensor(PREFIXES, device=device),
        req_pool_indices=torch.tensor([6, 0, 3, 5, 1], device=device),
        req_to_token=table.to(device),
    )


def check(form, shown, device, sinks=None):
    """Compare blocks that see what ``shown`` says; all of them see everything where it is None."""
    requests = step_of(device)
    generator = torch.Generator().manual_seed(1)

    def rand(rows, heads):
        return torch.randn(rows, heads, HEAD_DIM, generator=generator).to(device)

    pool = rand(241, KV_HEADS), rand(241, KV_HEADS)
    rows = len(PREFIXES) * SLOTS
    q, k, v = rand(rows, HEADS), rand(rows, KV_HEADS), rand(rows, KV_HEADS)
    how = {"heads_per_kv": HEADS // KV_HEADS, "dtype": torch.float32, "scale": SCALE}
    found = form(requests, SLOTS, *(() if shown is None else (shown,)), **how)(q, k, v, pool, sinks)
    for request, prefix in enumerate(PREFIXES):
        own = slice(request * SLOTS, (request + 1) * SLOTS)
        places = requests.req_to_token[requests.req_pool_indices[request], :prefix].long()
        keys, values = (torch.cat((cached[places], x[own])) for cached, x in zip(pool, (k, v), strict=True))
        seen = block_mask(shown or Visibility(), prefix, SLOTS).to(device)
        expected = attend_dense(q[own], keys, values, scale=SCALE, seen=seen, sinks=sinks)
        torch.testing.assert_close(found[own], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "kernels"])
@pytest.mark.parametrize("visibility", [None, *KINDS.values()], ids=["whole blocks", *KINDS])
def test_blocks_see_what_their_layer_shows(visibility, kernels):
    """Sinks take their share of every head."""
    function = block_attention if visibility is None else partial_attention
    form, device = (function.kernel, DEVICE) if kernels else (function.reference, "cpu")
    for sinks in (None, torch.linspace(-1, 4, HEADS, device=device)):
        check(form, visibility, device, sinks)


def test_a_layout_for_kernels_reads_no_length():
    """So that it can be captured: tensors of the device "meta" have no values to be read."""
    how = {"heads_per_kv": HEADS // KV_HEADS, "dtype": torch.float32, "scale": SCALE}
    for visibility in KINDS.values():
        partial_attention.kernel(step_of("meta"), SLOTS, visibility, **how)
    with pytest.raises((RuntimeError, NotImplementedError)):
        partial_attention.reference(step_of("meta"), SLOTS, KINDS["window from the slot"], **how)


WINDOWS = {"sinks": (5, 2), "no sink": (5, 0), "one row": (1, 0), "all of most": (25, 4), "wider than any": (40, 3)}


@pytest.mark.parametrize(("size", "sinks"), WINDOWS.values(), ids=WINDOWS.keys())
def test_a_window_has_the_first_and_the_last_rows(size, sinks):
    requests = step_of("cpu")
    seen = DraftWindow(size, sinks).of(requests)
    for request, prefix in enumerate(PREFIXES):
        rows = requests.req_to_token[requests.req_pool_indices[request], :prefix].tolist()
        expected = rows if prefix <= size + sinks else rows[:sinks] + rows[prefix - size :]
        found = seen.req_to_token[seen.req_pool_indices[request], : seen.prefix_lens[request]].tolist()
        assert found == expected
    assert torch.equal(seen.anchors, requests.anchors)


def test_a_window_reads_no_length_on_the_host():
    DraftWindow(5, 2).of(step_of("meta"))
