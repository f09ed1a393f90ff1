"""Training: what is minimised, what a checkpoint says, and replay of measured rounds."""

import json
from dataclasses import replace

import pytest
import torch
from accelerate.state import AcceleratorState
from dspark_training import replay as replay_module
from dspark_training.replay import replay
from dspark_training.report import StepReport, Sums
from dspark_training.settings import TrainConfig
from dspark_training.texts import Text
from dspark_training.trainer import DRAFT_DIR, LOG_FILE, answer_counts
from reference_decoding import decode_greedy

from sglang_dspark.draft.reduced_vocabulary import load_token_ids
from sglang_dspark.draft.weights import load_draft_model
from sglang_dspark.errors import ConfigError

pytestmark = pytest.mark.slow


def held_out_losses(trainer):
    reports = []
    trainer.run(reports.append)
    return [report.loss for report in reports if report.held_out]


def test_a_drafter_learns_a_small_corpus_by_heart(target, rows, config, make_trainer, tmp_path):
    texts = rows[:3]
    overfit = replace(config, steps=250, learning_rate=1e-2, batch_rows=3, anchors_per_row=20, checkpoint_every=250)
    trainer = make_trainer(overfit, texts=texts, held_out=texts)
    untrained = replay(trainer.model, target, texts, temperature=0, max_new_tokens=18)
    trainer.run()
    learned = replay(trainer.model, target, texts, temperature=0, max_new_tokens=18)
    assert untrained.accept_length < 2.5
    assert min(learned.survival) > 0.9
    stored = load_draft_model(tmp_path / DRAFT_DIR, dtype=torch.float32, device="cpu")
    stored.bind_target(target.embed_weight, target.lm_head_weight)
    assert replay(stored, target, texts, temperature=0, max_new_tokens=18).accept_length > 4


def test_a_run_goes_on_from_its_last_checkpoint(make_trainer, tmp_path):
    first = make_trainer()
    first.run(until=5)
    assert [path.name for path in tmp_path.glob("state-*")] == ["state-3"]
    again = make_trainer()
    assert again.progress.step == 3 and again.progress.best_step == 3
    assert 0 < again._scheduler.get_last_lr()[0] < first.config.learning_rate
    again.run()
    assert [path.name for path in tmp_path.glob("state-*")] == ["state-6"]
    held_out = [line for line in map(json.loads, (tmp_path / LOG_FILE).read_text().splitlines()) if line["held_out"]]
    assert [line["step"] for line in held_out] == [3, 6]
    assert held_out[1]["loss"] < held_out[0]["loss"]
    # It is over.
    assert make_trainer().run() is not None


def test_the_state_of_a_run_is_all_of_it(make_trainer, config):
    trainer = make_trainer()
    trainer.run(until=3)
    again = make_trainer()
    for (name, expected), found in zip(trainer.model.named_parameters(), again.model.parameters(), strict=True):
        assert torch.equal(found, expected), name
    moments = (t._optimizer.state_dict()["state"][0]["exp_avg"] for t in (trainer, again))
    assert torch.equal(*moments)
    assert config.steps == 6


def test_continuing_with_other_settings_is_refused(make_trainer, config, tmp_path):
    make_trainer().run(until=3)
    says = rf"other settings: learning_rate=0.0001 \(then 0.005\); give .* with --init {tmp_path}/draft to begin with"
    with pytest.raises(ConfigError, match=says):
        make_trainer(replace(config, learning_rate=1e-4))
    assert make_trainer(replace(config, steps=9, gradient_accumulation=2)).progress.step == 3


def test_a_drafter_whose_training_state_is_gone_is_not_trained_over(make_trainer, tmp_path):
    make_trainer().run()
    before = (tmp_path / DRAFT_DIR / "model.safetensors").read_bytes()
    (tmp_path / "state-6").rename(tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"draft holds a drafter, and the folder state-N next to it is gone"):
        make_trainer()
    assert (tmp_path / DRAFT_DIR / "model.safetensors").read_bytes() == before


def test_accumulated_gradients_are_the_mean_of_their_batches(make_trainer, config):
    """Two batches of three texts a step: as many steps of the schedule as without, and each reads all six texts."""
    halves = make_trainer(replace(config, batch_rows=3, gradient_accumulation=2), folder="halves")
    texts = []
    collate = halves._collate
    halves._collate = lambda drawn: texts.append(len(drawn[0])) or collate(drawn)
    halves.run(until=2)
    assert texts == [3, 3, 3, 3]
    assert halves._scheduler.last_epoch == halves.progress.step == 2


@pytest.fixture
def measured(monkeypatch):
    """Puts held-out accept lengths in this order, and a loss, in place of the measured ones."""

    def measured(*taus, loss=1.0):
        left = iter(taus)

        def report(self, step, accelerator, *, held_out):
            return StepReport(step, loss, 1.0, 1.0, 1.0, (0.5,) * 4, next(left) if held_out else 1.0, held_out)

        monkeypatch.setattr(Sums, "report", report)

    return measured


def test_the_checkpoint_with_the_longest_held_out_accept_length_stays(make_trainer, config, tmp_path, measured):
    measured(1.5, 1.9, 1.9, 1.2)
    config = replace(config, steps=8, checkpoint_every=2)
    make_trainer(config).run(until=4)
    best = (tmp_path / DRAFT_DIR / "model.safetensors").read_bytes()
    # An interruption does not make it forget which one that was.
    trainer = make_trainer(config)
    trainer.run()
    assert (trainer.progress.step, trainer.progress.best_step, trainer.progress.worse) == (8, 4, 2)
    assert (tmp_path / DRAFT_DIR / "model.safetensors").read_bytes() == best


def test_patience_ends_a_run(make_trainer, config, measured):
    measured(1.5, 1.9, 1.8, 1.7, 1.6)
    config = replace(config, steps=20, checkpoint_every=2, patience=2)
    trainer = make_trainer(config)
    trainer.run()
    assert (trainer.progress.step, trainer.progress.best_step) == (8, 4)
    again = make_trainer(config)
    again.run()
    assert again.progress.step == 8


def test_a_loss_that_is_not_a_number_ends_the_run(make_trainer, measured):
    measured(1.0, loss=float("nan"))
    with pytest.raises(ConfigError, match=r"--learning-rate 0\.005: training has diverged before step 3"):
        make_trainer().run()


def test_the_markov_embeddings_learn_at_a_rate_of_their_own(make_trainer, config):
    trainer = make_trainer(replace(config, schedule="constant_with_warmup", warmup_share=0.0))
    rest, per_token = trainer._optimizer.param_groups
    assert per_token["lr"] == pytest.approx(10 * rest["lr"])
    assert len(per_token["params"]) == 2


def test_the_drafter_proposes_the_most_frequent_tokens(make_trainer, rows, config, tmp_path):
    make_trainer(replace(config, draft_vocabulary=5)).run()
    counts = answer_counts(rows, 64)
    chosen = load_token_ids(tmp_path / DRAFT_DIR, 64)
    assert len(chosen) == 5
    assert min(counts[chosen]) >= counts[[token for token in range(64) if token not in chosen]].max()
    with pytest.raises(ConfigError, match="--draft-vocabulary 65 is more than the 64 tokens"):
        make_trainer(replace(config, draft_vocabulary=65), folder="other")


def test_taps_must_agree_with_the_target(make_trainer, config):
    with pytest.raises(ConfigError, match=r"target_layer_ids=\[0, 1\]"):
        make_trainer(replace(config, target_layer_ids=(0, 1)))


KINDS = {
    "gated, bfloat16": {"markov_head_type": "gated", "compute_dtype": "bfloat16", "steps": 12},
    "rnn, bfloat16": {"markov_head_type": "rnn", "compute_dtype": "bfloat16", "steps": 12},
    "DFlash 2": {
        "markov_head_type": "selector",
        "selector_top_k": 6,
        "conv_kernel_size": 2,
        "conv_group_size": 8,
        "confidence_head": False,
    },
    "no heads": {"markov_rank": 0, "confidence_head": False},
    "a part of the vocabulary": {"loss_vocab": 40, "loss_vocab_sampled": 8},
}


@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS.keys())
def test_every_kind_of_drafter_learns(changes, make_trainer, config):
    losses = held_out_losses(make_trainer(replace(config, **changes)))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("steps", 0),
        ("markov_rank", -1),
        ("markov_head_type", "lstm"),
        ("compute_dtype", "float16"),
        ("warmup_share", 1),
    ],
)
def test_settings_out_of_range_are_named(key, value):
    with pytest.raises(ConfigError, match=f"{key}="):
        TrainConfig(target_layer_ids=(0,), mask_token_id=2, **{key: value})


NEW_TOKENS = 14
W2 = "markov_head.markov_w2.weight"


@pytest.fixture(scope="module")
def half_trained(trainer_in, config, tmp_path_factory):
    """A drafter that is right often, but far from always."""
    AcceleratorState._reset_state(reset_partial_state=True)
    return trainer_in(tmp_path_factory.mktemp("half"), replace(config, steps=60, checkpoint_every=60)).run()


def runner(target):
    """The target as the literal loop calls it."""

    def run(ids):
        states = target.forward(torch.tensor([list(ids)]))
        return target.logits(states.last_hidden)[0], states.features[0]

    return run


def literal_rounds(model, target, rows):
    """Numbers of accepted drafts, and of committed tokens, of greedy decoding, one block at a time."""
    accepted, committed = [], 0
    for row in rows:
        prompt, stops = row.input_ids[: row.prompt_len].tolist(), target.stop_ids
        decoded = decode_greedy(model, runner(target), prompt, max_new_tokens=NEW_TOKENS, stop_token_ids=stops)
        accepted += [one.accepted for one in decoded.rounds]
        committed += round(decoded.accept_length * len(decoded.rounds))
    return accepted, committed


def test_greedy_replay_equals_the_literal_decoding_loop(target, rows, half_trained):
    accepted, committed = literal_rounds(half_trained, target, rows)
    report = replay(half_trained, target, rows, temperature=0, max_new_tokens=NEW_TOKENS)
    assert (report.num_rounds, report.num_committed) == (len(accepted), committed)
    survival = [sum(one > slot for one in accepted) / len(accepted) for slot in range(4)]
    assert report.survival == pytest.approx(survival)
    assert 1.1 < report.accept_length < 4.9


def test_sampled_replay_accepts_with_the_probability_of_speculative_sampling(target, rows, half_trained):
    """First-slot acceptance on fixed texts: the mean of min(1, p_d(y) / p_t(y)) over the anchors that were visited."""
    row = rows[0]
    states = target.forward(row.input_ids[None])
    p_target = torch.softmax(target.logits(states.last_hidden)[0], dim=-1)

    decoded = decode_greedy(half_trained, runner(target), row.input_ids[: row.prompt_len].tolist(), max_new_tokens=1)
    p_draft = torch.softmax(decoded.rounds[0].block.logits[0], dim=-1)
    label = row.input_ids[row.prompt_len + 1]
    expected = min(1.0, float(p_draft[label] / p_target[row.prompt_len, label]))
    reports = [replay(half_trained, target, [row], temperature=1, max_new_tokens=1, seed=seed) for seed in range(600)]
    observed = sum(report.survival[0] for report in reports) / len(reports)
    assert all(report.num_rounds == 1 for report in reports)
    # Four standard deviations of a mean of 600 coins.
    assert abs(observed - expected) < 4 * (0.25 / 600) ** 0.5 + 1e-6


def proposing(model, target, token_ids):
    """The same drafter with heads for these tokens only."""
    small = type(model)(replace(model.config, draft_vocab_size=len(token_ids)), own_embedding=False, own_lm_head=False)
    weights = model.state_dict()
    small.load_state_dict(weights | {W2: weights[W2][token_ids]}, strict=False)
    small.token_ids.copy_(torch.tensor(token_ids))
    small.bind_target(target.embed_weight, target.lm_head_weight)
    return small


@torch.no_grad()
def test_a_drafter_with_a_part_of_the_vocabulary_is_judged_by_what_it_proposes(target, rows, half_trained):
    written = torch.cat([row.input_ids[row.prompt_len :] for row in rows]).bincount(minlength=64)
    token_ids = sorted(written.argsort(descending=True)[:24].tolist())
    judged = {
        name: replay(half_trained, target, rows, temperature=0, max_new_tokens=NEW_TOKENS, **options)
        for name, options in {
            "part": {"token_ids": token_ids},
            "all": {},
            "every token named": {"token_ids": list(range(64))},
            "no Markov head": {"use_markov": False},
        }.items()
    }
    accepted, committed = literal_rounds(proposing(half_trained, target, token_ids), target, rows)
    part = judged["part"]
    assert (part.num_rounds, part.num_committed) == (len(accepted), committed)
    assert judged["every token named"] == judged["all"] != part
    assert judged["no Markov head"].accept_length < judged["all"].accept_length


def test_a_token_that_is_never_proposed_is_never_accepted_at_temperature_1(target, rows, half_trained):
    label = int(rows[0].input_ids[rows[0].prompt_len + 1])
    others = [token for token in range(64) if token != label]
    for seed in range(20):
        report = replay(half_trained, target, rows[:1], temperature=1, max_new_tokens=1, seed=seed, token_ids=others)
        assert report.survival[0] == 0


def test_long_texts_are_replayed_a_few_at_a_time(monkeypatch):
    monkeypatch.setattr(replay_module, "_BATCH_ROWS", 3)
    monkeypatch.setattr(replay_module, "_BATCH_TOKENS", 12)
    texts = [Text(torch.zeros(length), 1) for length in (4, 4, 4, 4, 2, 7, 20, 1, 1)]
    batches = [[len(text.input_ids) for text in batch] for batch in replay_module._batches(texts)]
    assert batches == [[4, 4, 4], [4, 2], [7], [20], [1, 1]]
    assert list(replay_module._batches([])) == []
