"""Pairs of a shape: as large as the released ones, and served without weights."""

import pytest
import torch
from shape_pair import SHAPES, write_pair
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from sglang_dspark.draft.formats import read_config
from sglang_dspark.draft.model import DraftModel
from sglang_dspark.tools.launch import CPU_ENV, CPU_FLAGS, LaunchedServer, dspark_flags


# Millions of weights, as published: of the target, and of the drafter without the embedding and the LM head.
@pytest.mark.slow
def test_a_shape_has_the_published_number_of_weights(tmp_path):
    write_pair(SHAPES["qwen3-8b"], tmp_path)
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "target"))
        draft = DraftModel(read_config(tmp_path / "draft"), own_embedding=False, own_lm_head=False)
    assert sum(weight.numel() for weight in target.parameters()) / 1e6 == pytest.approx(8190.7, abs=0.05)
    assert sum(weight.numel() for weight in draft.parameters()) / 1e6 == pytest.approx(1126.4, abs=0.05)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "target")) == target.config.vocab_size


@pytest.mark.slow
@pytest.mark.thorough
def test_a_pair_is_served_without_weights(tmp_path):
    write_pair(SHAPES["tiny"], tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "target")
    assert tokenizer.decode(tokenizer.encode("Größe 12 {x}")) == "Größe 12 {x}"
    flags = (
        *("--dtype", "bfloat16", "--load-format", "dummy", *dspark_flags(tmp_path / "draft")),
        *("--speculative-dspark-schedule", "static", "--speculative-dspark-simulate-acceptance", "1.0"),
    )
    with LaunchedServer(tmp_path / "target", *CPU_FLAGS, *flags, env=CPU_ENV) as server:
        messages = [{"role": "user", "content": "How long does a step take?"}]
        body = {"model": "m", "messages": messages, "max_tokens": 40, "ignore_eos": True}
        answer = server.post_json("/v1/chat/completions", body)
        stats = server.get_json("/dspark/stats")
    assert answer["usage"]["completion_tokens"] == 40
    assert answer["choices"][0]["message"]["content"].strip()
    assert stats["accept_length"] == 8.0  # of the block of seven and the bonus token, in every step
