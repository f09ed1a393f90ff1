"""Targets of other families, and what a drafter takes from its target."""

from types import SimpleNamespace

import pytest
import torch
from dspark_training.target import Target
from dspark_training.target_defaults import MaskTokens, default_depth, default_taps
from dspark_training.writers import InProcessWriter
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, LlamaConfig, Qwen3_5TextConfig

from sglang_dspark.errors import ConfigError

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "max_position_embeddings": 128,
}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 128, "eos_token_id": 1}
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 64}
FAMILIES = {
    "llama with scaled rope": LlamaConfig(
        **SHAPE, rope_parameters=LLAMA3_ROPE | {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    ),
    "gpt2": GPT2Config(**GPT2, bos_token_id=0, initializer_range=0.3),
    "gated delta nets": Qwen3_5TextConfig(
        **SHAPE,
        layer_types=["linear_attention", "full_attention"] * 2,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_target_of_another_family_is_tapped_and_trained_on(family, config, make_trainer):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family])
    target = Target(model, (-1, 0, 2))
    ids = torch.tensor([[5, 6, 7, 8]])
    hidden = model(ids, output_hidden_states=True).hidden_states
    states = target.forward(ids)
    embedded = model.get_input_embeddings()(ids)
    torch.testing.assert_close(states.features, torch.cat([embedded, hidden[1], hidden[3]], dim=-1))
    torch.testing.assert_close(states.last_hidden, hidden[-1])

    prompts = [[3, 4, 5], [6, 7], [8, 9, 10, 11]]
    rows = InProcessWriter(target).write(prompts, [0.0, 1.0, 1.0], 12, 0)
    settings = {name: value for name, value in vars(config).items() if name != "target_layer_ids"}
    config = type(config)(**settings, target_layer_ids=(-1, 0, 2))
    trainer = make_trainer(config, texts=rows, held_out=rows, target=target)
    reports = []
    trainer.run(reports.append)
    held_out = [report.loss for report in reports if report.held_out]
    assert held_out[-1] < held_out[0]


@pytest.mark.parametrize(("family", "less"), [("llama with scaled rope", 0.0), ("gated delta nets", 1.0)])
def test_factors_of_the_final_norm_are_those_that_it_applies(family, less):
    """Qwen3.5 stores them less one."""
    model = AutoModelForCausalLM.from_config(FAMILIES[family])
    factors = torch.linspace(0.5, 2.0, SHAPE["hidden_size"])
    model.base_model.norm.weight.data.copy_(factors - less)
    torch.testing.assert_close(Target(model, (0,)).final_norm_weight(), factors, rtol=1e-5, atol=1e-5)


def test_a_target_with_a_soft_cap_is_refused():
    config = Gemma2Config(**SHAPE, final_logit_softcapping=1.0, attn_logit_softcapping=None)
    with pytest.raises(ConfigError, match="Gemma2ForCausalLM: its logits are not its LM head times"):
        Target(AutoModelForCausalLM.from_config(config), (0,))


@pytest.mark.parametrize(
    ("num_layers", "taps", "depth"),
    [
        (36, (1, 9, 17, 25, 33), 5),  # DeepSpec's Qwen3-4B and -8B
        (40, (1, 10, 19, 28, 37), 5),  # Qwen3-14B
        (28, (1, 7, 13, 19, 25), 4),
        (6, (1, 2, 3), 1),
        (4, (1,), 1),
        (2, (0,), 1),
        (1, (-1,), 1),
    ],
)
def test_taps_and_depth_follow_from_the_depth_of_the_target(num_layers, taps, depth):
    assert default_taps(num_layers) == taps
    assert default_depth(num_layers) == depth


def mask_tokens(own=None, zeros=False, written=()):
    """Eight rows, six tokens in the tokenizer: 0 ends an answer, 1 to 3 are written, 4 and 5 are special."""
    tokenizer = SimpleNamespace(
        mask_token_id=own,
        all_special_ids=[0, 4],
        added_tokens_decoder={0: "<eos>", 4: "<pad>", 5: "<tool>"},
        get_vocab=lambda: {str(i): i for i in range(6)},
    )
    embedding, counts = torch.ones(8, 4), torch.tensor([9, 5, 5, 5, 0, 0, 0, 0])
    embedding[6:] *= not zeros
    counts[list(written)] = 1
    return MaskTokens(tokenizer=tokenizer, embedding=embedding, stop_ids=frozenset({0}), counts=counts)


def test_the_mask_is_the_tokenizers_own_or_one_that_nothing_writes():
    """Its own, then the first row without a token, unless its embedding is zero, then one that is rarely written."""
    assert mask_tokens(own=4).default() == 4
    assert mask_tokens().default() == 6
    assert mask_tokens(zeros=True).default() == 5
    assert mask_tokens(zeros=True, written=(5,)).default() == 4
    with pytest.raises(ConfigError, match="--mask-token-id 6 has an embedding of zeros"):
        mask_tokens(zeros=True).check(6)
    with pytest.raises(ConfigError, match="name a rare one with --mask-token-id"):
        mask_tokens(zeros=True, written=(4, 5)).default()
