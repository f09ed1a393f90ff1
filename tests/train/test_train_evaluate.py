from dataclasses import replace

import pytest
import torch

from sglang_dspark.draft.reference import decode_greedy
from sglang_dspark.train.evaluate import replay
from sglang_dspark.train.rows import ComputedStates, stored_states
from sglang_dspark.train.trainer import Trainer

NEW_TOKENS = 14


@pytest.fixture
def half_trained(target, corpus, config, tmp_path):
    """A drafter that is right often, but far from always."""
    config = replace(config, steps=60, checkpoint_every=60)
    return Trainer(config, target, corpus, corpus, tmp_path).run()


def test_greedy_replay_equals_the_literal_decoding_loop(target, rows, half_trained):
    def run_target(ids):
        states = target.forward(torch.tensor([list(ids)]))
        return target.logits(states.last_hidden)[0], states.features[0]

    rounds = committed = 0
    accepted = torch.zeros(4)
    for row in rows:
        prompt = row.input_ids[: row.prompt_len].tolist()
        decoded = decode_greedy(
            half_trained, run_target, prompt, max_new_tokens=NEW_TOKENS, stop_token_ids=target.stop_ids
        )
        rounds += len(decoded.rounds)
        committed += round(decoded.accept_length * len(decoded.rounds))
        for one in decoded.rounds:
            accepted[: one.accepted] += 1
    report = replay(half_trained, target, rows, ComputedStates(target), temperature=0, max_new_tokens=NEW_TOKENS)
    assert (report.num_rounds, report.num_committed) == (rounds, committed)
    assert report.survival == pytest.approx((accepted / rounds).tolist())
    assert 1.1 < report.accept_length < 4.9


def test_sampled_replay_accepts_with_the_probability_of_speculative_sampling(target, rows, half_trained):
    """First-slot acceptance on fixed texts: the mean of min(1, p_d(y) / p_t(y)) over the anchors that were visited."""
    row = rows[0]
    states = target.forward(row.input_ids[None])
    p_target = torch.softmax(target.logits(states.last_hidden)[0], dim=-1)

    def run_target(ids):
        states = target.forward(torch.tensor([list(ids)]))
        return target.logits(states.last_hidden)[0], states.features[0]

    decoded = decode_greedy(half_trained, run_target, row.input_ids[: row.prompt_len].tolist(), max_new_tokens=1)
    p_draft = torch.softmax(decoded.rounds[0].block.logits[0], dim=-1)
    label = row.input_ids[row.prompt_len + 1]
    expected = min(1.0, float(p_draft[label] / p_target[row.prompt_len, label]))
    reports = [
        replay(half_trained, target, [row], stored_states, temperature=1, max_new_tokens=1, seed=seed)
        for seed in range(600)
    ]
    observed = sum(report.survival[0] for report in reports) / len(reports)
    assert all(report.num_rounds == 1 for report in reports)
    # Four standard deviations of a mean of 600 coins.
    assert abs(observed - expected) < 4 * (0.25 / 600) ** 0.5 + 1e-6
