"""DSpark's counterexample (facts/dspark.md 6.3): why a draft's own value must not decide whether it is verified.

One request, two drafts, SPS(1, 2, 3) = 1.0, 0.5, 0.45. Target (A .7, B .3), drafter (.5, .5), so the first draft
survives with 0.8; after A the second one is confident (0.9), after B it is hopeless (0). Verifying two drafts pays off
after A only. A policy that looks at both confidences before it chooses the length verifies A and skips B, and A comes
out with 0.5 + 0.5 * 0.7 = 0.85 instead of 0.7.

tests/kernels/test_noise_reuse.py has the other way to 0.85: a lagged budget, and noise that is drawn again.
"""

import numpy as np
import pytest
import torch
from dspark_kernels import DraftHeads, RoundKeys, SamplingBatch, Windows, accept_ref, draft_block_ref
from scipy import stats

from sglang_dspark.step.selected import top_prefixes
from sglang_dspark.step.selection import early_stop

ALPHA = 1e-4
NUM_TRIALS = 30_000
TARGET, DRAFT = np.array([0.7, 0.3]), np.array([0.5, 0.5])
SURVIVAL = np.array([[0.8, 0.8 * 0.9], [0.8, 0.0]])  # by first draft
STEP_MS = 1 / np.array([1.0, 0.5, 0.45])


def early_stop_len(first_draft):
    return early_stop(SURVIVAL[first_draft : first_draft + 1], STEP_MS)[0]


def retrospective_len(first_draft):
    """The best of all lengths, known in hindsight."""
    rates = (1 + np.pad(SURVIVAL[first_draft].cumsum(), (1, 0))) / STEP_MS
    return int(rates.argmax())


def lagged(budget):
    return lambda first_draft: int(top_prefixes(torch.from_numpy(SURVIVAL[first_draft : first_draft + 1]), budget)[0])


def exact_distribution(length_of):
    """[2] distribution of the first token out: all drafts, all outcomes of acceptance."""
    distribution = np.zeros(2)
    for draft, drawn in enumerate(DRAFT):
        if length_of(draft) == 0:
            distribution += drawn * TARGET
            continue
        kept = min(1.0, TARGET[draft] / DRAFT[draft])
        residual = np.maximum(TARGET - DRAFT, 0)
        distribution[draft] += drawn * kept
        distribution += drawn * (1 - kept) * residual / residual.sum()
    return distribution


def simulated_distribution(length_of):
    """Relative frequency of A through the real drafting and acceptance."""
    trials = torch.arange(NUM_TRIALS)
    rows = SamplingBatch.from_lists(*([value] * NUM_TRIALS for value in (1.0, -1, 1.0, 0.0, None)))
    keys = RoundKeys(7, 1, trials, torch.zeros_like(trials))
    logits = torch.from_numpy(DRAFT).float().log().expand(NUM_TRIALS, 2, 2)
    block = draft_block_ref(logits, logits, torch.zeros_like(trials), DraftHeads(), rows, keys)
    lens = torch.tensor([length_of(0), length_of(1)])[block.tokens[:, 0]]
    indptr = torch.nn.functional.pad((lens + 1).cumsum(0), (1, 0))
    target = torch.from_numpy(TARGET).float().log().expand(int(indptr[-1]), -1)
    out = accept_ref(block, Windows(lens, indptr), target, keys.positions, rows, keys).out_tokens
    return (out[:, 0] == 0).double().mean().item()


def p_value(frequency):
    return stats.binomtest(round(frequency * NUM_TRIALS), NUM_TRIALS, TARGET[0]).pvalue


EXACT_RULES = {"early stop": early_stop_len, **{f"lagged budget of {budget}": lagged(budget) for budget in range(3)}}


def test_the_numbers_are_those_of_the_paper():
    assert np.minimum(TARGET, DRAFT).sum() == pytest.approx(SURVIVAL[0, 0])
    assert [retrospective_len(0), retrospective_len(1)] == [2, 0]
    assert [early_stop_len(0), early_stop_len(1)] == [0, 0]


@pytest.mark.parametrize("rule", EXACT_RULES)
def test_rules_without_anticipation_keep_the_distribution(rule):
    assert exact_distribution(EXACT_RULES[rule]) == pytest.approx(TARGET)
    assert p_value(simulated_distribution(EXACT_RULES[rule])) > ALPHA


def test_hindsight_bends_the_distribution():
    assert exact_distribution(retrospective_len) == pytest.approx([0.85, 0.15])
    frequency = simulated_distribution(retrospective_len)
    assert frequency == pytest.approx(0.85, abs=0.01)
    assert p_value(frequency) < ALPHA
