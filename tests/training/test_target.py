"""Tests of what a drafter takes from its target, and of the weights that a run begins with."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from dspark_training.block_forward import block_hidden, context_kv
from dspark_training.initial_drafter import InitialDrafter, initial_config, shape_of
from dspark_training.initialise import initialise
from dspark_training.target import Target
from dspark_training.target_defaults import MaskTokens, default_depth, default_taps
from dspark_training.texts import Text
from dspark_training.trainer import DRAFT_DIR
from dspark_training.writers import InProcessWriter
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, LlamaConfig, Qwen3_5TextConfig

from sglang_dspark.draft.model import DraftModel
from sglang_dspark.draft.reduced_vocabulary import load_token_ids
from sglang_dspark.draft.weights import load_draft_model, save_draft_model
from sglang_dspark.errors import CheckpointError, ConfigError

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


GOLDEN = Path(__file__).parents[1] / "data" / "golden"


@pytest.fixture
def finished(make_drafter, config, tmp_path):
    save_draft_model(make_drafter(config), tmp_path / "finished", include_embeddings=False)
    return InitialDrafter.load(str(tmp_path / "finished"))


def test_its_shape_is_taken_and_its_tensors_are_counted(finished, make_trainer, target, config, tmp_path):
    trainer = make_trainer(replace(config, **shape_of(finished.config)), init=finished)
    assert all(torch.equal(trainer.model.state_dict()[name], weight) for name, weight in finished.tensors.items())
    count = len(finished.tensors)
    assert finished.account(trainer.model) == f"{count} of {count} tensors are those of {finished.name}"


def test_what_has_another_shape_is_drawn_and_named(finished, make_trainer, target, config, tmp_path):
    other = replace(config, **shape_of(finished.config) | {"markov_rank": 5, "num_layers": 1})
    trainer = make_trainer(other, init=finished)
    assert torch.equal(trainer.model.fc.weight, finished.tensors["fc.weight"])
    account = finished.account(trainer.model)
    named = "confidence_head.proj.weight, markov_head.markov_w1.weight, markov_head.markov_w2.weight"
    total = len(trainer.model.state_dict())
    assert account.startswith(f"{total - 3} of {total} tensors are those of")
    assert f"drawn: {named}" in account


def test_the_projection_of_other_taps_is_drawn(finished, make_trainer, target, config, rows):
    """Other taps, as many, have the same shape but the weights of other layers."""
    taps = (0, 1)
    other = replace(config, **shape_of(finished.config) | {"target_layer_ids": taps})
    bare = [Text(row.input_ids, row.prompt_len) for row in rows]  # without the states of the first taps
    trainer = make_trainer(other, texts=bare, held_out=bare, target=Target(target.model, taps), init=finished)
    assert trainer.model.fc.weight.shape == finished.tensors["fc.weight"].shape
    assert not torch.equal(trainer.model.fc.weight, finished.tensors["fc.weight"])
    assert finished.account(trainer.model).endswith("drawn: fc.weight")


def test_conventions_of_another_trainer_are_kept(make_drafter, make_trainer, target, config, tmp_path):
    """DFlash 2, whose anchor does not predict, and a window: the drafter that comes out has them still."""
    additions = {"markov_head_type": "selector", "selector_top_k": 6, "conv_kernel_size": 2, "conv_group_size": 8}
    random_drafter = make_drafter(replace(config, **additions))
    like = replace(
        random_drafter.config,
        sample_from_anchor=False,
        layer_types=("sliding_attention", "full_attention"),
        sliding_window=8,
        causal_layers=(True, False),
    )
    random_drafter.config = like
    save_draft_model(random_drafter, tmp_path / "finished", include_embeddings=False)
    init = InitialDrafter.load(str(tmp_path / "finished"))
    config = replace(config, **shape_of(init.config))
    reports = []
    trainer = make_trainer(config, folder="run", init=init)
    trainer.run(reports.append)
    assert len(reports[0].acceptance) == like.gamma == 3
    losses = [report.loss for report in reports if report.held_out]
    assert losses[-1] < losses[0]
    trained = load_draft_model(tmp_path / "run" / DRAFT_DIR, dtype=torch.float32, device="cpu").config
    for name in ("sample_from_anchor", "layer_types", "sliding_window", "causal_layers", "block_size", *additions):
        assert getattr(trained, name) == getattr(like, name), name
    # A third layer would be like the second.
    deeper = replace(config, num_layers=3).draft_config(target.config)
    assert deeper.layer_types == ("sliding_attention", "full_attention", "full_attention")


def test_a_drafter_with_heads_for_a_part_of_the_vocabulary_gets_the_others(
    make_drafter, make_trainer, target, config, tmp_path
):
    model = make_drafter(config)
    ids = torch.tensor([3, 7, 20, 41])
    small = type(model)(replace(model.config, draft_vocab_size=4), own_embedding=False, own_lm_head=False)
    weights = model.state_dict()
    weights["markov_head.markov_w2.weight"] = weights["markov_head.markov_w2.weight"][ids]
    small.load_state_dict(weights)
    small.token_ids.copy_(ids)
    save_draft_model(small, tmp_path / "small", include_embeddings=False)
    init = InitialDrafter.load(str(tmp_path / "small"))
    config = replace(config, **shape_of(init.config))
    trainer = make_trainer(config, folder="run", init=init)
    rows = trainer.model.markov_head.markov_w2.weight
    assert torch.equal(rows[ids], weights["markov_head.markov_w2.weight"])
    assert int((rows != 0).any(1).sum()) == 4
    trainer.run()
    assert load_token_ids(tmp_path / "run" / DRAFT_DIR, 64) == ids.tolist()


def test_drafters_of_other_targets_and_of_none_are_refused(finished, target):
    assert initial_config(finished.name, target.config) == finished.config
    with pytest.raises(ConfigError, match=r"its hidden_size is \d+ and the target's 32; give a drafter of this target"):
        initial_config(str(GOLDEN / "vanilla_g7"), target.config)
    with pytest.raises(CheckpointError, match=r"--init='/nowhere/drafter': there is no such folder"):
        initial_config("/nowhere/drafter", target.config)


def initialised(draft_config, target, features):
    """A drafter that a run begins with."""
    model = DraftModel(draft_config, own_embedding=False, own_lm_head=False)
    model.bind_target(target.embed_weight, target.lm_head_weight)
    initialise(model, target, features, torch.Generator().manual_seed(0))
    return model


def test_first_layer_heads_read_one_row_at_a_fixed_distance(target, rows, config):
    """With 64 channels per head: the tiny target's 8 hold too few frequencies to tell positions apart."""
    features = torch.cat([row.features for row in rows])
    draft_config = replace(config.draft_config(target.config), head_dim=64, num_key_value_heads=2)
    model = initialised(draft_config, target, features)
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


def test_convolutions_start_by_changing_nothing(target, rows, config):
    hidden = []
    for convolved in (config, replace(config, conv_kernel_size=3, conv_group_size=8)):
        model = initialised(convolved.draft_config(target.config), target, rows[0].features)
        context = context_kv(model, rows[0].features[None])
        hidden.append(block_hidden(model, *context, torch.tensor([[9]]), rows[0].input_ids[None, 9:10]))
    assert torch.equal(*hidden)


def test_markov_biases_start_at_zero_and_embeddings_do_not(target, rows, config):
    model = initialised(config.draft_config(target.config), target, torch.cat([row.features for row in rows]))
    assert not model.markov_head.markov_w2.weight.any()
    torch.testing.assert_close(model.markov_head.markov_w1.weight.square().mean(), torch.tensor(1.0), atol=1e-3, rtol=0)
