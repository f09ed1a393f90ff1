"""Noise is drawn once. Drawing it twice is enough to bias the text, even though each draw alone is perfect.

The counterexample: target (0.7, 0.3), drafter (0.5, 0.5). Round 1 drafts two tokens and verifies none; its confidences
reveal what the second draft was, and the budget of round 2 depends on them: verify if it was token 0, else decode
plainly. With noise keyed by position, round 2 drafts that same token again. It is then kept whenever it is token 0
(probability 1/2), and drawn from the target otherwise: 0.5 + 0.5 * 0.7 = 0.85 instead of 0.7.
"""

import pytest
import torch
from dspark_kernels import (
    DraftHeads,
    RoundKeys,
    SamplingBatch,
    Windows,
    accept_ref,
    draft_block_ref,
    draw,
    uniform,
)
from dspark_kernels.sampling import noise
from scipy import stats

ALPHA = 1e-4
NUM_TRIALS = 100_000
TARGET = torch.tensor([0.7, 0.3])


def probability_of_token_0() -> float:
    """Relative frequency of token 0 at the position that round 1 drafted second and round 2 decides."""
    trials = torch.arange(NUM_TRIALS)
    rows = SamplingBatch.from_lists(*([value] * NUM_TRIALS for value in (1.0, -1, 1.0, 0.0, None)))

    def draft(keys):
        base_logits = torch.zeros(NUM_TRIALS, 2, 2)
        return draft_block_ref(base_logits, base_logits, torch.zeros_like(trials), DraftHeads(), rows, keys)

    first_round = draft(RoundKeys(1, 10, trials, torch.full_like(trials, 5)))
    lagged_budget = (first_round.tokens[:, 1] == 0).long()

    keys = RoundKeys(1, 11, trials, torch.full_like(trials, 6))
    block = draft(keys)
    indptr = torch.nn.functional.pad((lagged_budget + 1).cumsum(0), (1, 0))
    logits = TARGET.log().expand(int(indptr[-1]), -1)
    accepted = accept_ref(block, Windows(lagged_budget, indptr), logits, keys.positions, rows, keys)
    return (accepted.out_tokens[:, 0] == 0).double().mean().item()


def p_value(frequency: float) -> float:
    return stats.binomtest(round(frequency * NUM_TRIALS), NUM_TRIALS, 0.7).pvalue


def test_a_lagged_budget_leaves_the_distribution_alone():
    assert p_value(probability_of_token_0()) > ALPHA


@pytest.mark.slow
def test_noise_keyed_by_position_is_noticed(monkeypatch):
    def by_position(keys, num_slots, purpose):
        positions = keys.positions[:, None] + torch.arange(num_slots)
        return uniform(keys.seed, positions, keys.request_keys[:, None], 0, purpose)

    monkeypatch.setattr(RoundKeys, "block_uniform", by_position)
    frequency = probability_of_token_0()
    assert frequency == pytest.approx(0.85, abs=0.01)
    assert p_value(frequency) < ALPHA


def test_no_counter_occurs_twice_while_serving(monkeypatch):
    """Prompts, plain steps and rounds of one engine, slots shared by successive requests: every counter is new."""
    used = []

    def record(counter, key):
        words = torch.broadcast_tensors(*(torch.as_tensor(word) for word in (*counter, *key)))
        used.extend(zip(*(word.flatten().tolist() for word in words), strict=True))
        return philox(counter, key)

    philox = noise.philox4x32
    monkeypatch.setattr(noise, "philox4x32", record)
    bs, gamma, vocab_size = 4, 3, 7
    generator = torch.Generator().manual_seed(0)
    rows = SamplingBatch.from_lists(*([value] * bs for value in (1.0, -1, 1.0, 0.0, None)))
    for step in range(12):
        keys = RoundKeys(1, step, torch.randperm(9, generator=generator)[:bs], torch.zeros(bs, dtype=torch.long))
        logits = torch.randn(bs * (gamma + 1), vocab_size, generator=generator)
        if step % 4 == 0:
            draw(logits[:bs], rows, keys)
            continue
        base_logits = logits[: bs * gamma].view(bs, gamma, vocab_size)
        anchors = torch.zeros(bs, dtype=torch.long)
        block = draft_block_ref(base_logits, base_logits, anchors, DraftHeads(), rows, keys)
        indptr = torch.arange(bs + 1) * (gamma + 1)
        accept_ref(block, Windows(torch.full((bs,), gamma), indptr), logits, keys.positions, rows, keys)
    assert len(used) == len(set(used)) == 3 * bs + 9 * bs * (gamma + gamma + 1)
