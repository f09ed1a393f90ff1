"""Targets of served families that some flags make unserved."""

from types import SimpleNamespace

import pytest

from sglang_dspark.draft.families import FAMILIES, UNSERVED, family_of
from sglang_dspark.engine.startup.target_refusals import target_refusals
from sglang_dspark.errors import UnservedError


def refusals(architecture, rope=None, context_len=8192, **flags):
    text_config = SimpleNamespace(rope_parameters=rope, original_max_position_embeddings=4096)
    model_config = SimpleNamespace(hf_text_config=text_config, context_len=context_len)
    args = SimpleNamespace(**{"tp_size": 1, "flashinfer_allreduce_fusion_backend": None} | flags)
    return list(target_refusals(family_of([architecture]), model_config, args, window=8))


def test_sums_that_ranks_have_not_reduced_are_not_captured():
    fused = {"tp_size": 2, "flashinfer_allreduce_fusion_backend": "auto"}
    [refusal] = refusals("Glm4MoeForCausalLM", **fused)
    assert "pass --enforce-disable-flashinfer-allreduce-fusion" in refusal
    assert refusals("Glm4MoeForCausalLM", **fused | {"tp_size": 1}) == []
    assert refusals("Qwen3MoeForCausalLM", **fused) == []


@pytest.mark.parametrize(
    "rope", [{"rope_type": "longrope", "original_max_position_embeddings": 4096}, {"type": "longrope"}]
)
def test_a_target_whose_rotation_depends_on_the_batch(rope):
    [refusal] = refusals("Phi3ForCausalLM", rope)
    assert "--context-length 4088" in refusal
    assert refusals("Phi3ForCausalLM", rope, context_len=4088) == []
    assert refusals("Phi3ForCausalLM", {"rope_type": "default"}) == []


@pytest.mark.parametrize("unserved", UNSERVED, ids=lambda unserved: unserved.architectures[0])
def test_who_serves_what_dspark_does_not(unserved):
    for architecture in unserved.architectures:
        with pytest.raises(UnservedError) as caught:
            family_of([architecture])
        assert unserved.instead in str(caught.value) and unserved.reason in str(caught.value)
    assert not unserved.reason.endswith(".")  # one sentence, with the remedy
    assert not {family.architecture for family in FAMILIES} & set(unserved.architectures)
