"""What the drafter gets of a target whose ranks hold parts of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dspark.draft.formats import read_config
from sglang_dspark.draft.weights import load_draft_model
from sglang_dspark.engine.forward.target import Target

DRAFT_DIR = Path(__file__).parents[1] / "data" / "golden" / "vanilla_g7"
DRAFT = read_config(DRAFT_DIR)
ROWS_PER_RANK = 160  # of a vocabulary of 256, padded to 320


class TwoRanks:
    """A tensor-parallel group as rank 0 sees it; ``others`` are what rank 1 contributes, in order."""

    world_size = 2

    def __init__(self, *others: torch.Tensor) -> None:
        self._others = list(others)

    def all_gather(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat([part, self._others.pop(0)], dim)


def target_runner(**fields: Any) -> SimpleNamespace:
    wishes = ("dflash_use_aux_hidden_state", "dflash_target_layer_ids", "dflash_draft_num_layers")
    defaults = {
        **dict.fromkeys(wishes),
        "model_config": SimpleNamespace(head_dim=DRAFT.head_dim, get_num_kv_heads=lambda ranks: max(1, 2 // ranks)),
        "dtype": torch.float32,
        "kv_cache_dtype": torch.float32,
        "tp_group": SimpleNamespace(world_size=1),
    }
    return SimpleNamespace(**{**defaults, **fields})


@pytest.mark.parametrize(("tp_size", "layers"), [(1, 2), (2, 4), (4, 4)])
def test_the_draft_cache_is_counted_in_layers_of_one_rank(tp_size, layers):
    """Two draft layers of two K/V heads each; the target's two heads are divided, and held twice among four ranks."""
    runner = target_runner(tp_group=SimpleNamespace(world_size=tp_size))
    Target(runner, DRAFT)
    assert runner.dflash_draft_num_layers == layers


@pytest.mark.parametrize("tied", [True, False])
def test_the_drafter_reads_whole_matrices(tied):
    embedding, head = (torch.randn(2 * ROWS_PER_RANK, DRAFT.hidden_size) for _ in range(2))
    head = embedding if tied else head
    layers = [SimpleNamespace(weight=torch.nn.Parameter(whole[:ROWS_PER_RANK])) for whole in (embedding, head)]
    model = SimpleNamespace(get_input_embeddings=lambda: layers[0], lm_head=layers[0] if tied else layers[1])
    group = TwoRanks(embedding[ROWS_PER_RANK:], head[ROWS_PER_RANK:])
    target = Target(target_runner(tp_group=group, model=model), DRAFT)
    drafter = load_draft_model(DRAFT_DIR, dtype=torch.float32, device="cpu")
    drafter.embed_tokens = drafter.lm_head = None  # as in a checkpoint that leaves them out
    assert target.share_with(drafter) == ("embed_tokens.weight", "lm_head.weight")
    assert drafter.embed_weight.equal(embedding[: DRAFT.vocab_size])
    assert drafter.lm_head_weight.equal(head[: DRAFT.vocab_size])
    assert (drafter.embed_weight.data_ptr() == drafter.lm_head_weight.data_ptr()) == tied
