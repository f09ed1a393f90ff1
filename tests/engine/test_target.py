"""The drafter gets whole tensors of a target whose ranks hold parts of it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state import SpecAuxHiddenStateConfig
from sglang.srt.models.qwen3 import Qwen3ForCausalLM
from sglang.srt.runtime_context import get_parallel
from sglang_objects import ONE_RANK, model_config, partly, runner

from sglang_dspark.draft.config import EMBEDDING_TAP, DraftConfig
from sglang_dspark.draft.formats import read_config
from sglang_dspark.draft.weights import load_draft_model
from sglang_dspark.engine.target import Target
from sglang_dspark.errors import CheckpointError

DRAFT_DIR = Path(__file__).parents[1] / "data" / "golden" / "vanilla_g7"
DRAFT = read_config(DRAFT_DIR)
ROWS_PER_RANK = 160  # of a vocabulary of 256, padded to 320
layer = partial(partly, torch.nn.Module)


class TwoRanks:
    """A tensor-parallel group as rank 0 sees it; ``others`` are what rank 1 contributes, in order."""

    world_size = 2

    def __init__(self, *others: torch.Tensor) -> None:
        self._others = list(others)

    def all_gather(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat([part, self._others.pop(0)], dim)


def target_of(embedding: Any, head: Any, draft: DraftConfig = DRAFT, group: Any = ONE_RANK) -> Target:
    """The handle of a target with these layers."""
    model = partly(Qwen3ForCausalLM, get_input_embeddings=lambda: embedding, lm_head=head)
    known = {"dtype": torch.float32, "kv_cache_dtype": torch.float32, "spec_aux_config": SpecAuxHiddenStateConfig()}
    target = runner(model_config=model_config(quantization="fp8"), model=model, **known)
    with get_parallel().override(tp_group=group, tp_size=group.world_size):
        return Target(target, draft)


@pytest.mark.parametrize("tied", [True, False])
def test_the_drafter_reads_whole_matrices(tied):
    embedding, head = (torch.randn(2 * ROWS_PER_RANK, DRAFT.hidden_size) for _ in range(2))
    head = embedding if tied else head
    layers = [layer(weight=whole[:ROWS_PER_RANK]) for whole in (embedding, head)]
    group = TwoRanks(embedding[ROWS_PER_RANK:], head[ROWS_PER_RANK:])
    target = target_of(layers[0], layers[0] if tied else layers[1], group=group)
    drafter = load_draft_model(DRAFT_DIR, dtype=torch.float32, device="cpu")
    drafter.embed_tokens = drafter.lm_head = None  # as in a checkpoint that leaves them out
    assert target.share_with(drafter) == ("embed_tokens.weight", "lm_head.weight")
    assert drafter.embed_weight.equal(embedding[: DRAFT.vocab_size])
    assert drafter.lm_head_weight.equal(head[: DRAFT.vocab_size])
    assert (drafter.embed_weight.data_ptr() == drafter.lm_head_weight.data_ptr()) == tied


@pytest.mark.parametrize("reduced", [False, True], ids=["whole", "reduced vocabulary"])
def test_whole_matrices_follow_a_target_in_place(reduced):
    """Those of two ranks are copies, so are the rows of a reduced vocabulary; captured graphs read where they lie."""
    before, after = (torch.randn(2 * ROWS_PER_RANK, DRAFT.hidden_size) for _ in range(2))
    part = layer(weight=before[:ROWS_PER_RANK])
    target = target_of(part, part, group=TwoRanks(before[ROWS_PER_RANK:], after[ROWS_PER_RANK:]))
    drafter = load_draft_model(DRAFT_DIR, dtype=torch.float32, device="cpu")
    drafter.embed_tokens = drafter.lm_head = None
    if reduced:
        drafter.token_ids = torch.tensor([3, 5, 8])
    target.share_with(drafter)
    read = drafter.embed_weight, drafter.lm_head_weight
    part.weight = after[:ROWS_PER_RANK]
    drafter.follow_target(*target.weights(drafter))
    assert drafter.embed_weight is read[0] and drafter.lm_head_weight is read[1]
    assert read[0].equal(after[: DRAFT.vocab_size])
    assert read[1].equal(after[[3, 5, 8]] if reduced else after[: DRAFT.vocab_size])


PLAIN = torch.nn.Linear(DRAFT.hidden_size, 320, bias=False).half()  # of a vocabulary of 256
UNREADABLE = {
    "codes": layer(weight=torch.zeros(320, DRAFT.hidden_size, dtype=torch.int8)),
    "eight-bit floats": layer(weight=torch.zeros(320, DRAFT.hidden_size).to(torch.float8_e4m3fn)),
    "turned": layer(weight=torch.zeros(DRAFT.hidden_size, 320)),
    "packed under another name": layer(qweight=torch.zeros(16, 320, dtype=torch.int32)),
    "packed for AMX": layer(weight=PLAIN.weight.data, use_intel_amx_backend=True),
}


def share(embedding: Any, head: Any, *, own: bool) -> tuple[Any, tuple[str, ...]]:
    """A drafter and what it reads of a target with these layers."""
    drafter = load_draft_model(DRAFT_DIR, dtype=torch.float32, device="cpu")
    if not own:
        drafter.embed_tokens = drafter.lm_head = None
    return drafter, target_of(embedding, head).share_with(drafter)


@pytest.mark.parametrize("head", UNREADABLE.values(), ids=UNREADABLE)
def test_a_head_that_is_quantised_is_not_read(head):
    drafter, shared = share(PLAIN, head, own=True)
    assert shared == () and drafter.lm_head is not None
    drafter.embed_tokens = None
    with pytest.raises(CheckpointError, match=r"no lm_head.weight of its own, and the target's lm_head is (qua|pac)"):
        share(PLAIN, head, own=False)


def test_each_layer_is_decided_by_itself():
    """A quantised embedding beside a head that is not, and one that is both."""
    codes = UNREADABLE["codes"]
    drafter, shared = share(codes, PLAIN, own=True)
    assert shared == () and drafter.embed_weight is drafter.embed_tokens.weight
    with pytest.raises(CheckpointError, match=r"no embed_tokens.weight of its own"):
        share(codes, PLAIN, own=False)
    assert share(codes, codes, own=True)[1] == ()


def test_the_drafter_reads_layers_below_their_adapters():
    """Whose forms are known of them alone; an adapter's embedding is laid out for the rows of a forward."""

    def adapted(below):
        return layer(weight=below.weight, base_layer=below)

    assert share(adapted(PLAIN), adapted(PLAIN), own=False)[1] == ("embed_tokens.weight", "lm_head.weight")
    with pytest.raises(CheckpointError, match="is packed for AMX"):
        share(adapted(PLAIN), adapted(UNREADABLE["packed for AMX"]), own=False)
    embedding = torch.nn.Embedding(256, DRAFT.hidden_size)
    with_embedding = replace(DRAFT, target_layer_ids=(EMBEDDING_TAP, *DRAFT.target_layer_ids))
    target = target_of(adapted(embedding), None, with_embedding)
    ids, captured = torch.tensor([5, 6]), torch.zeros(2, 3 * DRAFT.hidden_size)
    assert target.features(ids, captured)[:, : DRAFT.hidden_size].equal(embedding(ids))
    # Rows of pictures have no ids, and bring what they are embedded as.
    embedded = torch.randn(2, DRAFT.hidden_size)
    assert target.features(embedded, captured).equal(torch.cat([embedded, captured], dim=1))
