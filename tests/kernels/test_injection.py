"""Writing committed K/V: the fused kernel against the torch form, and both against the draft model."""

from unittest.mock import patch

import pytest
import torch
from dspark_kernels import CommitRows, dispatch, kv_inject, kv_inject_ref
from rounding import DTYPES, assert_equal_but_for_rounding

from sglang_dspark.draft.config import DraftConfig
from sglang_dspark.draft.model import DraftModel

EPS = 1e-6


def draft_config():
    return DraftConfig(
        hidden_size=40,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=24,
        vocab_size=50,
        rms_norm_eps=EPS,
        rope_theta=1e4,
        max_position_embeddings=4096,
        block_size=4,
        mask_token_id=1,
        target_layer_ids=(0,),
        num_target_layers=2,
        markov_rank=0,
        markov_head_type=None,
        enable_confidence_head=False,
        confidence_head_with_markov=False,
    )


SHAPES = [
    pytest.param((1, 1, 1, 24), id="n1-L1-h1-d24"),
    pytest.param((7, 3, 3, 64), id="n7-L3-h3-d64"),
    pytest.param((17, 5, 8, 128), id="n17-L5-h8-d128"),
    pytest.param((33, 2, 5, 96), id="n33-L2-h5-d96"),
    pytest.param((4, 2, 1, 2), id="n4-L2-h1-d2"),
]


def inject_case(shape, dtype, device, seed=0):
    num_rows, num_layers, num_heads, head_dim = shape
    generator = torch.Generator().manual_seed(seed)
    num_slots = num_rows + 9

    def rand(*size):
        return torch.randn(*size, generator=generator).to(dtype).to(device)

    pools = [rand(num_layers, num_slots, num_heads, head_dim) for _ in range(2)]
    inv_freq = 1.0 / 1e6 ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    return [
        rand(num_rows, num_layers * 2 * num_heads * head_dim),
        rand(num_layers, head_dim),
        EPS,
        inv_freq.to(device),
        torch.randint(0, 2000, (num_rows,), generator=generator).to(device),
        (1 + torch.randperm(num_slots - 1, generator=generator)[:num_rows]).to(device),
        tuple(pools),
    ]


def run_both(case, rows=None):
    """Pools after the kernel and after the reference, compared but for the padding slot; the kernel's are returned."""
    (*inputs, (k_pool, v_pool)), pools = case, []
    for form in (kv_inject, kv_inject_ref):
        written = k_pool.clone(), v_pool.clone()
        form(*inputs, written, rows)
        pools.append(written)
    for kernel, reference in zip(*pools, strict=True):
        assert_equal_but_for_rounding(kernel[:, 1:], reference[:, 1:])
    return pools[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_equals_reference(shape, dtype, device):
    case = inject_case(shape, dtype, device)
    _, v_pool = run_both(case)
    num_rows, num_layers, num_heads, head_dim = shape
    values = case[0].view(num_rows, num_layers, 2, num_heads, head_dim)[:, :, 1]
    assert torch.equal(v_pool[:, case[5]], values.transpose(0, 1))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_only_committed_rows_are_written(index_dtype, device):
    case = inject_case((12, 2, 2, 24), torch.float32, device)
    accepted = torch.tensor([2, 0, -1, 3])
    columns = torch.tensor([0, 1, 2, 3, 0, 1, 0, 0, 1, 0, 0, 99])
    requests = torch.tensor([0, 0, 0, 0, 1, 1, 2, 3, 3, 4, -1, 3])
    expected = torch.tensor([1, 1, 1, 0, 1, 0, 0, 1, 1, 0, 0, 0], dtype=torch.bool)
    rows = CommitRows(*(x.to(index_dtype).to(device) for x in (columns, requests, accepted)))
    assert torch.equal(rows.kept().cpu(), expected)
    untouched = [pool.clone() for pool in case[-1]]
    for pool, before in zip(run_both(case, rows), untouched, strict=True):
        changed = (pool != before).flatten(2).any(-1).any(0).cpu()
        assert set(changed.nonzero().squeeze(1).tolist()) == set(case[5].cpu()[expected].tolist())


def test_what_is_computed_is_narrowed_where_the_host_may_read(device):
    """On a CPU to the kept rows; with kernels not at all, for their number is known on the device alone."""
    columns, requests = torch.tensor([0, 1, 0, 1], device=device), torch.tensor([0, 0, 1, 1], device=device)
    rows = CommitRows(columns, requests, torch.tensor([0, 1], device=device))
    assert rows.narrowed() == (slice(None), rows)
    on_host = CommitRows(*(part.cpu() for part in vars(rows).values()))
    with patch.object(dispatch, "_anywhere", []):
        kept, rest = on_host.narrowed()
    assert kept.tolist() == [0, 2, 3] and rest is None


def test_the_input_may_be_a_slice_and_may_be_empty(device):
    case = inject_case((6, 2, 3, 64), torch.bfloat16, device)
    wide = torch.cat([case[0], case[0]], dim=1)
    run_both([wide[:, : case[0].shape[1]], *case[1:]])
    before = case[-1][0].clone()
    kv_inject(case[0][:0], *case[1:4], case[4][:0], case[5][:0], *case[6:])
    assert torch.equal(case[-1][0], before)


def test_shapes_that_do_not_fit_are_refused(device):
    case = inject_case((3, 2, 3, 64), torch.float32, device)
    with pytest.raises(ValueError, match="L \\* 2 \\* kv_heads \\* hd"):
        kv_inject(case[0][:, :-1], *case[1:])
    k_pool, v_pool = case[6]
    with pytest.raises(ValueError, match="contiguous"):
        kv_inject(*case[:6], (k_pool.transpose(1, 2).contiguous().transpose(1, 2), v_pool))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_both_forms_store_what_the_draft_model_computes(dtype, device):
    config = draft_config()
    torch.manual_seed(0)
    model = DraftModel(config, own_embedding=False, own_lm_head=False).to(device, dtype)
    for layer in model.decoder_layers:
        torch.nn.init.normal_(layer.self_attn.k_norm.weight)
    model.freeze()
    num_rows, num_slots = 11, 30
    h_ctx = torch.randn(num_rows, config.hidden_size, device=device, dtype=dtype)
    positions = torch.randint(0, 3000, (num_rows,), device=device)
    slots = 1 + torch.randperm(num_slots - 1, device=device)[:num_rows]
    k, v = model.context_kv(h_ctx, positions)
    inputs = model.context_projection(h_ctx), model.context_k_norm, config.rms_norm_eps, model.rotary.inv_freq
    shape = (config.num_hidden_layers, num_slots, config.num_key_value_heads, config.head_dim)
    k_pool, v_pool = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
    kv_inject_ref(*inputs, positions, slots, (k_pool, v_pool))
    assert torch.equal(k_pool[:, slots], k) and torch.equal(v_pool[:, slots], v)
    kv_inject(*inputs, positions, slots, (k_pool, v_pool))
    assert_equal_but_for_rounding(k_pool[:, slots], k)
    assert torch.equal(v_pool[:, slots], v)
