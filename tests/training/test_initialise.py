from dataclasses import replace

import torch
from dspark_training.initialise import initialise

from sglang_dspark.draft.model import DraftModel


def test_first_layer_heads_read_one_row_at_a_fixed_distance(target, rows, config):
    """With 64 channels per head: the tiny target's 8 hold too few frequencies to tell positions apart."""
    draft_config = replace(config.draft_config(target.model.config), head_dim=64, num_key_value_heads=2)
    model = DraftModel(draft_config, own_embedding=False, own_lm_head=False)
    model.bind_target(target.embed_weight, target.lm_head_weight)
    features = torch.cat([row.features for row in rows])
    initialise(model, target, features, torch.Generator().manual_seed(0))

    context_len = 18
    with torch.no_grad():
        k_ctx, _ = model.context_kv(model.project_context(features[:context_len]), torch.arange(context_len))
        ids = torch.tensor([int(rows[0].input_ids[-1]), 2, 2, 2])
        reads = []

        def attend(layer, q, k, v, sinks):
            if layer == 0:
                keys = torch.cat([k_ctx[0], k]).repeat_interleave(2, dim=1)
                scores = torch.einsum("thd,shd->hts", q, keys) / 8
                reads.append(torch.arange(context_len, context_len + 4) - scores.argmax(-1))
            return torch.zeros_like(q)

        model.forward_block(model.embed(ids), torch.arange(context_len, context_len + 4), attend)
    # Two query heads per key/value head, four slots: the distance to the row that each reads. Keys with an unlucky sign
    # are read by nobody, so a few slots may read elsewhere.
    expected = torch.tensor([1, 2, 1, 2])[:, None].expand(4, 4)
    assert int((reads[0] == expected).sum()) >= 12


def test_markov_biases_start_at_zero_and_embeddings_do_not(target, rows, config):
    model = DraftModel(config.draft_config(target.model.config), own_embedding=False, own_lm_head=False)
    model.bind_target(target.embed_weight, target.lm_head_weight)
    features = torch.cat([row.features for row in rows])
    initialise(model, target, features, torch.Generator().manual_seed(0))
    assert not model.markov_head.markov_w2.weight.any()
    torch.testing.assert_close(model.markov_head.markov_w1.weight.square().mean(), torch.tensor(1.0), atol=1e-3, rtol=0)
