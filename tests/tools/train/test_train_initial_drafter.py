"""A run that begins with a finished drafter, of any format and shape."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sglang_dspark.draft.reduced_vocabulary import load_token_ids
from sglang_dspark.draft.weights import load_draft_model, save_draft_model
from sglang_dspark.errors import CheckpointError, ConfigError
from sglang_dspark.tools.train.initial_drafter import InitialDrafter, initial_config, shape_of
from sglang_dspark.tools.train.reports import StepReport
from sglang_dspark.tools.train.run_folder import DRAFT_DIR
from sglang_dspark.tools.train.target import Target
from sglang_dspark.tools.train.trainer import Trainer

GOLDEN = Path(__file__).parents[2] / "data" / "golden"


@pytest.fixture
def finished(random_drafter, tmp_path):
    save_draft_model(random_drafter, tmp_path / "finished", include_embeddings=False)
    return InitialDrafter.load(str(tmp_path / "finished"))


def test_its_shape_is_taken_and_its_tensors_are_counted(finished, target, corpus, config, tmp_path):
    trainer = Trainer(
        replace(config, **shape_of(finished.config)), target, corpus, corpus, tmp_path / "a", init=finished
    )
    assert all(torch.equal(trainer.model.state_dict()[name], weight) for name, weight in finished.tensors.items())
    count = len(finished.tensors)
    assert finished.account(trainer.model) == f"{count} of {count} tensors are those of {finished.name}"


def test_what_has_another_shape_is_drawn_and_named(finished, target, corpus, config, tmp_path):
    other = replace(config, **shape_of(finished.config) | {"markov_rank": 5, "num_layers": 1})
    trainer = Trainer(other, target, corpus, corpus, tmp_path / "b", init=finished)
    assert torch.equal(trainer.model.fc.weight, finished.tensors["fc.weight"])
    account = finished.account(trainer.model)
    named = "confidence_head.proj.weight, markov_head.markov_w1.weight, markov_head.markov_w2.weight"
    total = len(trainer.model.state_dict())
    assert account.startswith(f"{total - 3} of {total} tensors are those of")
    assert f"drawn anew: {named}" in account


def test_what_is_larger_begins_as_the_drafter_that_it_grew_from(finished, target, corpus, config, tmp_path):
    """More layers, a larger rank, wider MLPs: the same loss in the first step, and then everything learns."""
    same = replace(config, **shape_of(finished.config), log_every=1, steps=3)
    grown = replace(same, num_layers=4, markov_rank=12, intermediate_size=same.intermediate_size + 16)
    losses, accounts = [], []
    for settings in (same, grown):
        trainer = Trainer(settings, target, corpus, corpus, tmp_path / str(settings.num_layers), init=finished)
        accounts.append(finished.account(trainer.model))
        before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
        reports: list[StepReport] = []
        trainer.run(reports.append)
        losses.append(reports[0].loss)
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)
    assert "enlarged: confidence_head.proj.weight, layers.0.mlp.down_proj.weight" in accounts[1]
    assert accounts[1].endswith("; the further layers begin without effect")
    assert "layers.2.self_attn.o_proj" not in accounts[1]
    assert [name for name, weight in trainer.model.state_dict().items() if torch.equal(weight, before[name])] == []


def test_the_projection_of_other_taps_is_drawn(finished, target, corpus, config, tmp_path):
    """As many taps have the same shape, and the weights of other layers."""
    taps = (0, 1)
    other = replace(config, **shape_of(finished.config) | {"target_layer_ids": taps})
    trainer = Trainer(other, Target(target.model, taps), corpus, corpus, tmp_path / "c", init=finished)
    assert trainer.model.fc.weight.shape == finished.tensors["fc.weight"].shape
    assert not torch.equal(trainer.model.fc.weight, finished.tensors["fc.weight"])
    assert finished.account(trainer.model).endswith("drawn anew: fc.weight")


def test_conventions_of_another_trainer_are_kept(random_drafter, target, corpus, config, tmp_path):
    """The layout of DFlash, whose anchor does not predict, and a window: the drafter that comes out has them still."""
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
    trainer = Trainer(config, target, corpus, corpus, tmp_path / "run", init=init)
    trainer.run(reports.append)
    assert len(reports[0].acceptance) == like.gamma == 3
    losses = [report.loss for report in reports if report.held_out]
    assert losses[-1] < losses[0]
    trained = load_draft_model(tmp_path / "run" / DRAFT_DIR, dtype=torch.float32, device="cpu").config
    for name in ("sample_from_anchor", "layer_types", "sliding_window", "causal_layers", "block_size"):
        assert getattr(trained, name) == getattr(like, name), name
    # A third layer would be like the second.
    deeper = replace(config, num_layers=3).draft_config(target.config)
    assert deeper.layer_types == ("sliding_attention", "full_attention", "full_attention")


def test_a_drafter_with_heads_for_a_part_of_the_vocabulary_gets_the_others(
    make_drafter, target, corpus, config, tmp_path
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
    trainer = Trainer(config, target, corpus, corpus, tmp_path / "run", init=init)
    rows = trainer.model.markov_head.markov_w2.weight
    assert torch.equal(rows[ids], weights["markov_head.markov_w2.weight"])
    assert int((rows != 0).any(1).sum()) == 4
    trainer.run()
    assert load_token_ids(tmp_path / "run" / DRAFT_DIR, 64) == ids.tolist()


def test_own_heads_that_are_not_the_targets_are_named(random_drafter, target, corpus, config, tmp_path):
    random_drafter.bind_target(target.embed_weight, target.lm_head_weight * 2)
    save_draft_model(random_drafter, tmp_path / "own", include_embeddings=True)
    init = InitialDrafter.load(str(tmp_path / "own"))
    config = replace(config, **shape_of(init.config))
    account = init.account(Trainer(config, target, corpus, corpus, tmp_path / "run", init=init).model)
    assert account.endswith("the target's stand in for its own lm_head.weight")


def test_drafters_of_other_targets_and_of_none_are_refused(finished, target):
    assert initial_config(finished.name, target.config) == finished.config
    with pytest.raises(ConfigError, match=r"its hidden_size is \d+ and the target's 32; give a drafter of this target"):
        initial_config(str(GOLDEN / "vanilla_g7"), target.config)
    with pytest.raises(CheckpointError, match=r"--init='/nowhere/drafter': there is no such folder"):
        initial_config("/nowhere/drafter", target.config)
