"""Confidence logits of blocks: the kernel, its torch form, and the module that was trained."""

import pytest
import torch
from draft_heads import as_weights, draft_heads
from dspark_kernels import block_confidence, block_confidence_ref

# Sums of up to 2053 products in float32, in different orders.
FLOAT32_TOL = {"atol": 2e-5, "rtol": 2e-5}
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16


def make(device, *, bs=3, gamma=4, width=6, rank=5, with_markov=True, dtype=torch.float32):
    """The head as a module, and the arguments of both forms."""
    generator = torch.Generator().manual_seed(width + rank)
    markov, confidence = draft_heads(
        "vanilla",
        vocab_size=29,
        hidden_size=width,
        block_size=gamma,
        rank=rank,
        confidence_with_markov=with_markov,
        std=0.3,
    )
    markov, confidence = markov.to(device, dtype), confidence.to(device, dtype)
    heads = as_weights(markov, confidence)
    hidden = torch.randn(bs, gamma, width, generator=generator).to(device, dtype)
    anchors = torch.randint(29, (bs,), generator=generator).to(device)
    tokens = torch.randint(29, (bs, gamma), generator=generator).to(device)
    return markov, confidence, (hidden, anchors, tokens, heads.confidence, heads.w1)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize(
    ("bs", "gamma", "width", "rank"), [(1, 1, 1, 1), (3, 7, 6, 5), (2, 3, 1025, 40), (1, 2, 2048, 3)]
)
def test_kernel_and_reference_compute_what_the_module_does(device, bs, gamma, width, rank, dtype):
    markov, confidence, given = make(device, bs=bs, gamma=gamma, width=width, rank=rank, dtype=dtype)
    hidden, anchors, tokens, *_ = given
    before = torch.cat((anchors[:, None], tokens[:, :-1]), dim=1)
    expected = confidence(hidden, markov.markov_w1(before))
    assert torch.equal(block_confidence_ref(*given), expected)
    torch.testing.assert_close(block_confidence(*given), expected, **FLOAT32_TOL)


def test_a_head_without_markov_embeddings_needs_none(device):
    _, confidence, (hidden, anchors, tokens, weights, _) = make(device, with_markov=False)
    expected = confidence(hidden, None)
    assert torch.equal(block_confidence_ref(hidden, anchors, tokens, weights, None), expected)
    torch.testing.assert_close(block_confidence(hidden, anchors, tokens, weights, None), expected, **FLOAT32_TOL)


@pytest.mark.parametrize("form", [block_confidence, block_confidence_ref])
def test_a_head_of_another_rank_is_refused(device, form):
    _, _, (hidden, anchors, tokens, weights, _) = make(device, rank=5)
    for w1 in (torch.zeros(9, 4, device=device), None):
        with pytest.raises(ValueError, match="same checkpoint"):
            form(hidden, anchors, tokens, weights, w1)
