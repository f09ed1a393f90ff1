"""Targets of served families that some flags make unserved."""

from types import SimpleNamespace

import pytest
from sglang.srt.models.gemma3_causal import Gemma3DecoderLayer

from sglang_dspark.draft.families import FAMILIES, UNSERVED, family_of
from sglang_dspark.engine.startup import target_refusals as module
from sglang_dspark.engine.startup.target_refusals import target_refusals
from sglang_dspark.errors import UnservedError


def refusals(architecture, rope=None, context_len=8192, **flags):
    text_config = SimpleNamespace(rope_parameters=rope, original_max_position_embeddings=4096)
    model_config = SimpleNamespace(hf_text_config=text_config, context_len=context_len)
    args = SimpleNamespace(**{"tp_size": 1, "flashinfer_allreduce_fusion_backend": None} | flags)
    return list(target_refusals(family_of([architecture]), model_config, args, window=8))


@pytest.mark.parametrize("reduced", [False, True])
def test_sums_that_ranks_have_not_reduced_are_not_captured(reduced, monkeypatch):
    monkeypatch.setattr(module, "reduces_what_it_captures", lambda: reduced)
    fused = {"tp_size": 2, "flashinfer_allreduce_fusion_backend": "auto"}
    for architecture in ("Glm4MoeForCausalLM", "GptOssForCausalLM", "Qwen3VLMoeForConditionalGeneration"):
        found = refusals(architecture, **fused)
        assert ["pass --enforce-disable-flashinfer-allreduce-fusion" in refusal for refusal in found] == (
            [] if reduced else [True]
        )
    assert refusals("Glm4MoeForCausalLM", **fused | {"tp_size": 1}) == []
    assert refusals("Qwen3MoeForCausalLM", **fused) == []


@pytest.mark.parametrize("hands_on", [True, False])
def test_hidden_states_that_are_not_summed_up_are_not_drafted_from(hands_on, monkeypatch):
    def whole(self, hidden_states):
        return hidden_states

    def halves(self, hidden_states, residual):
        return hidden_states, residual

    monkeypatch.setattr(Gemma3DecoderLayer, "forward", halves if hands_on else whole)
    found = refusals("Gemma3ForCausalLM")
    assert len(found) == hands_on
    assert all("use SGLang 0.5.15.post1" in refusal for refusal in found)


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
