import json
import os
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from dspark_training import trainer as trainer_module
from dspark_training.corpus import Corpus
from dspark_training.initial_drafter import InitialDrafter
from dspark_training.optimizer import learning_rate_factor
from dspark_training.replay import replay
from dspark_training.report import StepReport, Sums
from dspark_training.run_folder import DRAFT_DIR, LOG_FILE, STATE_FILE
from dspark_training.settings import TrainConfig
from dspark_training.texts import stored_states
from dspark_training.trainer import Trainer, answer_counts

from sglang_dspark.draft.reduced_vocabulary import load_token_ids
from sglang_dspark.draft.weights import load_draft_model
from sglang_dspark.errors import ConfigError

pytestmark = pytest.mark.slow


def test_a_drafter_learns_a_small_corpus_by_heart(target, rows, config, tmp_path):
    corpus = Corpus(rows[:3])
    overfit = replace(config, steps=250, learning_rate=1e-2, batch_rows=3, anchors_per_row=20, checkpoint_every=250)
    trainer = Trainer(overfit, target, corpus, corpus, tmp_path)
    untrained = replay(trainer.model, target, corpus.rows, stored_states, temperature=0, max_new_tokens=18)
    trainer.run()
    learned = replay(trainer.model, target, corpus.rows, stored_states, temperature=0, max_new_tokens=18)
    assert untrained.accept_length < 2.5
    assert min(learned.survival) > 0.9
    stored = load_draft_model(tmp_path / DRAFT_DIR, dtype=torch.float32, device="cpu")
    stored.bind_target(target.embed_weight, target.lm_head_weight)
    assert replay(stored, target, corpus.rows, stored_states, temperature=0, max_new_tokens=18).accept_length > 4


def test_a_resumed_run_equals_an_uninterrupted_one(target, corpus, config, tmp_path):
    config = replace(config, loss_vocab=40, loss_vocab_sampled=8, batch_rows=4)
    whole = Trainer(config, target, corpus, corpus, tmp_path / "whole").run()
    Trainer(config, target, corpus, corpus, tmp_path / "parts").run(until=5)
    resumed = Trainer(config, target, corpus, corpus, tmp_path / "parts")
    assert resumed.step == 3
    parts = resumed.run()
    for (name, expected), found in zip(whole.named_parameters(), parts.parameters(), strict=True):
        assert torch.equal(found, expected), name


def test_continuing_with_other_settings_is_refused(target, corpus, config, tmp_path):
    Trainer(config, target, corpus, corpus, tmp_path).run(until=3)
    with pytest.raises(ConfigError, match=r"other settings: learning_rate=0\.0001 \(then 0\.005\); give"):
        Trainer(replace(config, learning_rate=1e-4), target, corpus, corpus, tmp_path)
    # What the checkpoint holds cannot change with it: only a better drafter is written again.
    for change in ({"draft_vocabulary": 5}, {"own_embeddings": True}):
        (name,) = change
        says = rf"other settings: {name}=.*; give .* or another --output, with --init {tmp_path}/draft to begin with"
        with pytest.raises(ConfigError, match=says):
            Trainer(replace(config, **change), target, corpus, corpus, tmp_path)
    # What only says how long, how often and in which pieces can.
    assert Trainer(replace(config, steps=9, micro_batch_rows=2), target, corpus, corpus, tmp_path).step == 3


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 torn", b"not a state"])
def test_a_damaged_state_is_named(target, corpus, config, tmp_path, content):
    (tmp_path / "training_state.pt").write_bytes(content)
    with pytest.raises(ConfigError, match=r"training_state.pt is damaged .*remove it to start afresh"):
        Trainer(config, target, corpus, corpus, tmp_path)


def test_continuing_on_other_texts_is_refused(target, rows, corpus, config, tmp_path):
    """One log would hold measurements on two held-out sets."""
    Trainer(config, target, corpus, corpus, tmp_path).run(until=3)
    for train, held_out in ((Corpus(rows[:5]), corpus), (corpus, Corpus(rows[1:]))):
        with pytest.raises(ConfigError, match=r"of a run on other texts; give the same --corpus"):
            Trainer(config, target, train, held_out, tmp_path)
    assert Trainer(config, target, corpus, corpus, tmp_path).step == 3


def test_a_drafter_whose_training_state_is_gone_is_not_trained_over(target, corpus, config, tmp_path):
    Trainer(config, target, corpus, corpus, tmp_path).run()
    before = (tmp_path / DRAFT_DIR / "model.safetensors").read_bytes()
    (tmp_path / STATE_FILE).unlink()
    with pytest.raises(ConfigError, match=r"draft holds a drafter, and training_state.pt is gone"):
        Trainer(config, target, corpus, corpus, tmp_path)
    assert (tmp_path / DRAFT_DIR / "model.safetensors").read_bytes() == before


def test_others_may_read_the_drafter(target, corpus, config, tmp_path):
    """A server under another user serves what was trained by root."""
    previous = os.umask(0o022)
    try:
        Trainer(config, target, corpus, corpus, tmp_path).run()
    finally:
        os.umask(previous)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / DRAFT_DIR).iterdir()}
    assert modes == {"model.safetensors": 0o644, "config.json": 0o644}


def test_a_run_that_was_killed_logs_every_step_once(target, corpus, config, tmp_path):
    """It goes on from the checkpoint of step 3, and writes the report of step 4 again."""
    Trainer(config, target, corpus, corpus, tmp_path / "whole").run()
    Trainer(config, target, corpus, corpus, tmp_path / "killed").run(until=5)
    with (tmp_path / "killed" / LOG_FILE).open("a") as log:
        log.write('{"step": 5, "lo')
    Trainer(config, target, corpus, corpus, tmp_path / "killed").run()
    whole, killed = (
        [json.loads(line) for line in (tmp_path / name / LOG_FILE).read_text().splitlines()]
        for name in ("whole", "killed")
    )
    assert [(entry["step"], entry["held_out"]) for entry in killed] == [
        (entry["step"], entry["held_out"]) for entry in whole
    ]
    assert [entry["loss"] for entry in killed if entry["held_out"]] == [
        entry["loss"] for entry in whole if entry["held_out"]
    ]


def test_held_out_means_do_not_depend_on_what_is_read_together(target, rows, corpus, config, tmp_path):
    """Five rows in pieces of two, of which the last is one row."""
    reports = {}
    for most in (5, 2):
        apart = replace(config, batch_rows=5, micro_batch_rows=most, steps=1, checkpoint_every=1, anchors_per_row=3)
        found = []
        Trainer(apart, target, corpus, Corpus(rows[:5]), tmp_path / str(most)).run(found.append)
        (reports[most],) = [report for report in found if report.held_out]
    for name in ("loss", "ce", "l1", "confidence", "acceptance", "tau"):
        assert getattr(reports[2], name) == pytest.approx(getattr(reports[5], name), rel=1e-5), name


def test_a_step_does_not_depend_on_what_is_read_together(target, corpus, config, tmp_path):
    """Gradients of pieces of the step, sorted by length, add up to that of the whole."""
    whole = Trainer(replace(config, loss_vocab=40, loss_vocab_sampled=8), target, corpus, corpus, tmp_path / "whole")
    pieces = Trainer(replace(whole.config, micro_batch_rows=4), target, corpus, corpus, tmp_path / "pieces")
    for trainer in (whole, pieces):
        trainer._train_step()
    for (name, expected), found in zip(whole.model.named_parameters(), pieces.model.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, atol=1e-6, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def taus(values):
    """Held-out accept lengths in this order, in place of the measured ones."""
    measured = iter(values)

    def report(self, step, seconds, processes, *, held_out):
        rates = (0.5,) * 4
        tau = next(measured) if held_out else 1.0
        return StepReport(step, 1.0, 1.0, 1.0, 1.0, rates, tau, seconds, held_out)

    return report


def test_the_checkpoint_with_the_longest_held_out_accept_length_stays(target, corpus, config, tmp_path, monkeypatch):
    monkeypatch.setattr(Sums, "report", taus([1.5, 1.9, 1.9, 1.2]))
    config = replace(config, steps=8, checkpoint_every=2)
    trainer = Trainer(config, target, corpus, corpus, tmp_path)
    trainer.run(until=4)
    best = (tmp_path / DRAFT_DIR / "model.safetensors").read_bytes()
    # An interruption does not make it forget which one that was.
    trainer = Trainer(config, target, corpus, corpus, tmp_path)
    trainer.run()
    assert (trainer.step, trainer.progress.best_step, trainer.progress.worse) == (8, 4, 2)
    assert (tmp_path / DRAFT_DIR / "model.safetensors").read_bytes() == best
    assert torch.load(tmp_path / STATE_FILE)["step"] == 8


def test_patience_ends_a_run(target, corpus, config, tmp_path, monkeypatch):
    monkeypatch.setattr(Sums, "report", taus([1.5, 1.9, 1.8, 1.7, 1.6]))
    config = replace(config, steps=20, checkpoint_every=2, patience=2)
    trainer = Trainer(config, target, corpus, corpus, tmp_path)
    trainer.run()
    assert (trainer.step, trainer.progress.best_step) == (8, 4)
    again = Trainer(config, target, corpus, corpus, tmp_path)
    again.run()
    assert again.step == 8  # its patience is over


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_schedules_rise_and_end_where_they_should(schedule, config):
    config = replace(config, schedule=schedule, steps=100, warmup_share=0.1)
    factors = [learning_rate_factor(config, step) for step in range(101)]
    assert factors[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert factors[55] == pytest.approx({"cosine": 0.5, "linear": 0.5, "constant": 1.0}[schedule])
    assert factors[100] == pytest.approx(1.0 if schedule == "constant" else 0.0)
    late = [learning_rate_factor(config, step, start=40) for step in range(40, 101)]
    assert late[:10] == pytest.approx(factors[:10])
    assert late[35] == pytest.approx(factors[55])
    assert late[60] == pytest.approx(factors[100])


def test_muon_takes_the_matrices_and_adamw_the_rest(target, corpus, config, tmp_path):
    config = replace(config, optimizer="muon", learning_rate=2e-3)
    trainer = Trainer(config, target, corpus, corpus, tmp_path)
    adamw, muon = trainer.optimizer.state_dict()
    taken = {id(p) for p in trainer.optimizer.param_groups[-1]["params"]}
    names = {name for name, p in trainer.model.named_parameters() if id(p) in taken}
    assert "fc.weight" in names and "layers.1.mlp.down_proj.weight" in names
    assert not any("markov" in name or "norm" in name or "confidence" in name for name in names)
    assert sum(len(group["params"]) for part in (adamw, muon) for group in part["param_groups"]) == len(
        list(trainer.model.parameters())
    )
    reports = []
    trainer.run(reports.append, until=3)
    Trainer(config, target, corpus, corpus, tmp_path).run(reports.append)
    held_out = [report.loss for report in reports if report.held_out]
    assert held_out[-1] < held_out[0]


def test_the_drafter_proposes_the_most_frequent_tokens(target, corpus, config, tmp_path):
    Trainer(replace(config, draft_vocabulary=5), target, corpus, corpus, tmp_path).run()
    counts = answer_counts(corpus, 64)
    chosen = load_token_ids(tmp_path / DRAFT_DIR, 64)
    assert len(chosen) == 5
    assert min(counts[chosen]) >= counts[[token for token in range(64) if token not in chosen]].max()
    with pytest.raises(ConfigError, match="draft_vocabulary=65 is more than the 64 tokens"):
        Trainer(replace(config, draft_vocabulary=65), target, corpus, corpus, tmp_path / "other")


def test_taps_must_agree_with_the_target(target, corpus, config, tmp_path):
    with pytest.raises(ConfigError, match=r"target_layer_ids=\[0, 1\]"):
        Trainer(replace(config, target_layer_ids=(0, 1)), target, corpus, corpus, tmp_path)


@pytest.mark.parametrize("head", ["gated", "rnn"])
def test_other_heads_and_bfloat16_train(head, target, corpus, config, tmp_path):
    config = replace(config, markov_head_type=head, compute_dtype="bfloat16", steps=12)
    reports = []
    Trainer(config, target, corpus, corpus, tmp_path).run(reports.append)
    held_out = [report.loss for report in reports if report.held_out]
    assert held_out[-1] < held_out[0]


def test_a_drafter_without_heads_trains(target, corpus, config, tmp_path):
    config = replace(config, markov_rank=0, confidence_head=False)
    reports = []
    Trainer(config, target, corpus, corpus, tmp_path).run(reports.append)
    held_out = [report.loss for report in reports if report.held_out]
    assert held_out[-1] < held_out[0]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("steps", 0),
        ("markov_rank", -1),
        ("markov_head_type", "lstm"),
        ("compute_dtype", "float16"),
        ("warmup_share", 1.0),
        ("max_minutes", 0.0),
    ],
)
def test_settings_out_of_range_are_named(key, value):
    with pytest.raises(ConfigError, match=f"{key}="):
        TrainConfig(target_layer_ids=(0,), mask_token_id=2, **{key: value})


class Clock:
    """Stands in for the module ``time``: every look takes one second."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        self.now += 1.0
        return self.now


def test_a_time_limit_ends_the_run_with_its_learning_rate_at_zero(target, corpus, config, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer_module, "time", Clock())
    config = replace(config, steps=10**6, max_minutes=4, log_every=1)
    trainer = Trainer(config, target, corpus, corpus, tmp_path)
    rates, reports = [], []
    trainer.run(reports.append, on_step=lambda step: rates.append(trainer.optimizer.param_groups[0]["lr"]))
    peak = max(rates)
    assert 20 < len(rates) < 240
    assert peak == pytest.approx(config.learning_rate, rel=0.05)
    assert rates[: rates.index(peak)] == sorted(rates[: rates.index(peak)])
    assert rates[rates.index(peak) :] == sorted(rates[rates.index(peak) :], reverse=True)
    assert rates[-1] < 0.01 * peak
    # A checkpoint each minute of the four, the last one at the end.
    held_out = [report for report in reports if report.held_out]
    assert 3 <= len(held_out) <= 4
    assert held_out[-1].step == trainer.step == len(rates)
    assert 240 <= held_out[-1].seconds < 250
    assert trainer.progress.shown(config) == (240, 240)

    again = Trainer(config, target, corpus, corpus, tmp_path)
    assert again.step == trainer.step
    again.run()
    assert again.step == trainer.step  # its time is over


def test_the_warm_up_begins_when_kernels_are_compiled(target, corpus, config, tmp_path, monkeypatch):
    """By the clock it would be over before the second step."""
    clock = Clock()
    monkeypatch.setattr(trainer_module, "time", clock)
    config = replace(config, steps=10**6, max_minutes=4, warmup_share=0.1, checkpoint_every=1)
    trainer = Trainer(config, target, corpus, corpus, tmp_path)
    train_step = trainer._train_step

    def compiling():
        train_step()
        if trainer.step == 0:
            clock.now += 60

    monkeypatch.setattr(trainer, "_train_step", compiling)
    rates = []
    trainer.run(on_step=lambda step: rates.append(trainer.optimizer.param_groups[0]["lr"]), until=30)
    assert rates[1] < 0.1 * config.learning_rate
    assert rates[:15] == sorted(rates[:15])
    assert max(rates) == pytest.approx(config.learning_rate, rel=0.05)


@pytest.mark.parametrize("slow", ["_evaluate", "_save"])
def test_checkpoints_take_a_tenth_of_the_time_at_most(slow, target, corpus, config, tmp_path, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(trainer_module, "time", clock)
    config = replace(config, steps=10**6, max_minutes=5)
    trainer = Trainer(config, target, corpus, corpus, tmp_path)
    whole = getattr(trainer, slow)

    def slowly():
        clock.now += 10
        return whole()

    monkeypatch.setattr(trainer, slow, slowly)
    reports = []
    trainer.run(reports.append)
    steps = [report.step for report in reports if report.held_out]
    assert len(steps) >= 3
    assert all(later - earlier > 90 for earlier, later in pairwise(steps[:-1]))


def test_steps_end_a_run_whose_time_is_longer(target, corpus, config, tmp_path):
    trainer = Trainer(replace(config, max_minutes=60), target, corpus, corpus, tmp_path)
    trainer.run()
    assert trainer.step == config.steps
    assert (tmp_path / DRAFT_DIR / "model.safetensors").exists()


def test_a_drafter_can_be_trained_on_from_another(target, corpus, config, tmp_path):
    first = Trainer(replace(config, steps=40), target, corpus, corpus, tmp_path / "first")
    first.run()
    folder = tmp_path / "first" / DRAFT_DIR
    same = Trainer(config, target, corpus, corpus, tmp_path / "same", init=InitialDrafter.load(str(folder)))
    for name, weight in same.model.state_dict().items():
        assert torch.equal(weight, first.model.state_dict()[name].bfloat16().float()), name
    deeper = Trainer(
        replace(config, num_layers=3, markov_rank=4),
        target,
        corpus,
        corpus,
        tmp_path / "b",
        init=InitialDrafter.load(str(folder)),
    )
    assert torch.equal(deeper.model.fc.weight, same.model.fc.weight)
    assert deeper.model.markov_head.rank == 4
    # A resumed run goes on from its own state.
    same.run(until=3)
    again = Trainer(config, target, corpus, corpus, tmp_path / "same", init=InitialDrafter.load(str(folder)))
    assert again.step == 3
    assert not torch.equal(again.model.fc.weight, deeper.model.fc.weight)


def test_a_diverged_run_keeps_its_last_checkpoint(target, corpus, config, tmp_path):
    trainer = Trainer(config, target, corpus, corpus, tmp_path / "run")
    trainer.run(until=3)
    kept = (tmp_path / "run" / DRAFT_DIR / "model.safetensors").read_bytes()
    trainer.model.fc.weight.data.fill_(float("nan"))
    # Noticed at the next report, not at the next checkpoint.
    with pytest.raises(ConfigError, match=r"before step 4; .* --output, and --init \S+/run/draft to go on from"):
        trainer.run()
    assert (tmp_path / "run" / DRAFT_DIR / "model.safetensors").read_bytes() == kept
    early = Trainer(config, target, corpus, corpus, tmp_path / "early")
    early.model.fc.weight.data.fill_(float("nan"))
    with pytest.raises(ConfigError, match=r"diverged before step 2; give a smaller one and another --output$"):
        early.run()
