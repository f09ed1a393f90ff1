from dataclasses import replace

import pytest
import torch
from accelerate.state import AcceleratorState
from dspark_kernels import MarkovWalk
from dspark_training import replay as replay_module
from dspark_training.block_forward import block_hidden
from dspark_training.replay import replay
from dspark_training.texts import Text
from reference_decoding import decode_greedy

from sglang_dspark.draft.reduced_vocabulary import ProposalHeads

pytestmark = pytest.mark.slow

NEW_TOKENS = 14


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


def test_greedy_replay_equals_the_literal_decoding_loop(target, rows, half_trained):
    rounds = committed = 0
    accepted = torch.zeros(4)
    for row in rows:
        prompt = row.input_ids[: row.prompt_len].tolist()
        decoded = decode_greedy(
            half_trained, runner(target), prompt, max_new_tokens=NEW_TOKENS, stop_token_ids=target.stop_ids
        )
        rounds += len(decoded.rounds)
        committed += round(decoded.accept_length * len(decoded.rounds))
        for one in decoded.rounds:
            accepted[: one.accepted] += 1
    report = replay(half_trained, target, rows, temperature=0, max_new_tokens=NEW_TOKENS)
    assert (report.num_rounds, report.num_committed) == (rounds, committed)
    assert report.survival == pytest.approx((accepted / rounds).tolist())
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


def literal_rounds(model, target, row, token_ids):
    """(rounds, committed) of greedy decoding that proposes `token_ids` only, one block at a time."""
    text, start = row.input_ids, row.prompt_len
    states = target.forward(text[None])
    heads = ProposalHeads(model, token_ids)
    end, rounds, committed = len(text) - 1, 0, 0
    while start < min(row.prompt_len + NEW_TOKENS, end):
        k, v = model.context_kv(model.project_context(states.features[0, :start]), torch.arange(start))
        hidden = block_hidden(model, k[:, None], v[:, None], torch.tensor([[start]]), text[None, start, None])[0, 0]
        token, accepted = int(text[start]), 0
        for slot in range(model.config.block_size):
            # The head is a vanilla one: slots do not depend on those before but by the last token.
            walk = MarkovWalk(heads.weights.markov, hidden[None, slot, None])
            logits = walk.corrected(torch.tensor([token]), heads.base_logits(hidden[slot : slot + 1]), None)
            token = token_ids[int(logits.argmax())]
            if start + 1 + slot > end or token != text[start + 1 + slot]:
                break
            accepted += 1
        moved = min(start + accepted + 1, end)
        rounds, committed, start = rounds + 1, committed + moved - start, moved
    return rounds, committed


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
    literal = [literal_rounds(half_trained, target, row, token_ids) for row in rows]
    part = judged["part"]
    assert (part.num_rounds, part.num_committed) == tuple(map(sum, zip(*literal, strict=True)))
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
