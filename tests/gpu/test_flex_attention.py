"""The trainer's attention as torch's kernel on a GPU, against the chunked form. Not run on one yet."""

import pytest
import torch
from dspark_training.attention import ChunkedAttention, FlexAttention

from sglang_dspark.draft.config import DraftConfig

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

# bfloat16 products whose sums both sides round once.
ROUNDING = {"atol": 2e-2, "rtol": 2e-2}
LAYERS, SLOTS = 2, 7


@pytest.mark.parametrize(("texts", "ctx_len", "num_anchors"), [(1, 300, 33), (3, 1021, 128)])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_the_kernel_equals_the_chunked_form_with_its_gradients(texts, ctx_len, num_anchors, window, with_sinks):
    heads, kv_heads, head_dim = 32, 8, 128
    config = DraftConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=100,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        max_position_embeddings=4096,
        block_size=SLOTS,
        mask_token_id=1,
        target_layer_ids=(0,),
        num_target_layers=4,
        markov_rank=0,
        markov_head_type=None,
        enable_confidence_head=False,
        confidence_head_with_markov=False,
        layer_types=("full_attention", "full_attention" if window is None else "sliding_attention"),
        sliding_window=window,
        sink_layers=(with_sinks,) * LAYERS,
    )
    torch.manual_seed(0)
    options = {"device": "cuda", "dtype": torch.bfloat16}
    anchors = torch.stack([torch.randperm(ctx_len - 1)[:num_anchors].sort().values for _ in range(texts)]).cuda()
    context = [torch.randn(LAYERS, texts, ctx_len, kv_heads, head_dim, **options) for _ in range(2)]
    rows = [
        torch.randn(texts * num_anchors * SLOTS, count, head_dim, **options) for count in (heads, kv_heads, kv_heads)
    ]
    # Exact in bfloat16, to which the chunked form rounds them.
    sinks = [torch.arange(heads, device="cuda") / 4 - 1] if with_sinks else []
    found, expected = ([x.clone().requires_grad_() for x in context + rows + sinks] for _ in range(2))
    sinks_of = [x[5] if with_sinks else None for x in (found, expected)]
    flex = FlexAttention(*found[:2], anchors, config, compiled=True)
    chunked = ChunkedAttention(*expected[:2], anchors, config)
    for layer in range(LAYERS):
        ours, theirs = flex(layer, *found[2:5], sinks_of[0]), chunked(layer, *expected[2:5], sinks_of[1])
        torch.testing.assert_close(ours, theirs, **ROUNDING)
        weights = torch.randn_like(ours)
        (ours * weights).sum().backward()
        (theirs * weights).sum().backward()
    for ours, theirs in zip(found, expected, strict=True):
        size = theirs.grad.float().norm()
        assert (ours.grad.float() - theirs.grad.float()).norm() < 0.02 * size
