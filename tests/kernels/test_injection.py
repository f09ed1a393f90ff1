"""Writing committed K/V: the fused kernel against the torch form, and both against the draft model."""

from unittest.mock import patch

import pytest
import torch
from canonical_drafter import config_json
from dspark_kernels import CommitRows, dispatch, kv_inject, kv_inject_ref
from rounding import DTYPES, assert_equal_but_for_rounding

from sglang_dspark.draft.formats import read_content
from sglang_dspark.draft.model import DraftModel

EPS = 1e-6


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_only_committed_rows_are_written(index_dtype, device):
    generator, slots = torch.Generator().manual_seed(0), torch.arange(3, 15, device=device)
    projected, norm = (torch.randn(*s, generator=generator).to(device) for s in ((12, 2 * 2 * 2 * 24), (2, 24)))
    given = projected, norm, EPS, torch.ones(12, device=device), slots, slots
    accepted = torch.tensor([2, 0, -1, 3])
    columns = torch.tensor([0, 1, 2, 3, 0, 1, 0, 0, 1, 0, 0, 99])
    requests = torch.tensor([0, 0, 0, 0, 1, 1, 2, 3, 3, 4, -1, 3])
    expected = torch.tensor([1, 1, 1, 0, 1, 0, 0, 1, 1, 0, 0, 0], dtype=torch.bool)
    rows = CommitRows(*(x.to(index_dtype).to(device) for x in (columns, requests, accepted)))
    assert torch.equal(rows.kept().cpu(), expected)
    for form in (kv_inject, kv_inject_ref):
        for rows_or_all, written in ((rows, expected), (None, torch.ones(12, dtype=torch.bool))):
            pools = tuple(torch.zeros(2, 16, 2, 24, device=device) for _ in range(2))
            form(*given, pools, rows_or_all)
            for pool in pools:
                changed = (pool[:, 1:] != 0).flatten(2).any(-1).any(0).cpu()
                assert set((1 + changed.nonzero().squeeze(1)).tolist()) == set(slots.cpu()[written].tolist())


def test_what_is_computed_is_narrowed_where_the_host_may_read(device):
    """On a CPU to the kept rows; with kernels not at all, for their number is known on the device alone."""
    columns, requests = torch.tensor([0, 1, 0, 1], device=device), torch.tensor([0, 0, 1, 1], device=device)
    rows = CommitRows(columns, requests, torch.tensor([0, 1], device=device))
    assert rows.narrowed() == (slice(None), rows)
    on_host = CommitRows(*(part.cpu() for part in vars(rows).values()))
    with patch.object(dispatch, "_anywhere", []):
        kept, rest = on_host.narrowed()
    assert kept.tolist() == [0, 2, 3] and rest is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_both_forms_store_what_the_draft_model_computes(dtype, device):
    config = read_content(config_json(num_hidden_layers=3, layer_types=...), origin="").config
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
