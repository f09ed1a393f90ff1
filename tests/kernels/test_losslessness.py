"""The text follows the target's distribution under all combinations of filters, and the test notices if it does not."""

import pytest
from dspark_kernels import Purpose, RoundKeys
from dspark_kernels.acceptance import acceptance_reference
from pairwise import pairwise
from token_distribution import Rule, SyntheticPair, distribution_p_values, mean_distance, run_trials

pytestmark = pytest.mark.slow

ALPHA = 1e-4
MIN_DISTANCE = 0.1
MATRIX = [Rule(*values) for values in pairwise((0.5, 1.0, 1.7), (-1, 5), (1.0, 0.8), (0.0, 0.1))]
PLAIN = Rule()
ENOUGH = 40_000
POWERFUL = 100_000  # trials that show a 2 % error of the acceptance probability far beyond ALPHA


@pytest.fixture(scope="module")
def pair():
    return SyntheticPair()


@pytest.mark.parametrize(
    "rule", MATRIX, ids=lambda rule: f"T{rule.temperature}-k{rule.top_k}-p{rule.top_p}-m{rule.min_p}"
)
def test_the_text_follows_the_target(pair, rule):
    trials = run_trials(pair, rule, ENOUGH)
    assert min(mean_distance(pair, rule, trials)) > MIN_DISTANCE
    assert (trials.accept_lens == pair.gamma).sum() > 500  # the bonus after a full block is tested too
    assert min(distribution_p_values(pair, rule, trials)) > ALPHA


@pytest.mark.parametrize("rule", [Rule(1.0, seeded=True), Rule(0.5, 5, 0.8, 0.1, seeded=True)])
def test_the_text_of_seeded_requests_follows_the_target_over_seeds(pair, rule):
    trials = run_trials(pair, rule, ENOUGH)
    assert (trials.accept_lens == pair.gamma).sum() > 500
    assert min(distribution_p_values(pair, rule, trials)) > ALPHA


def test_the_powerful_run_passes_unharmed(pair):
    trials = run_trials(pair, PLAIN, POWERFUL, full_blocks=True)
    assert min(distribution_p_values(pair, PLAIN, trials)) > ALPHA


def rejected(pair, rule, trials):
    return min(distribution_p_values(pair, rule, trials)) < ALPHA


@pytest.mark.parametrize("factor", [0.98, 1.02])
def test_a_two_percent_error_of_the_acceptance_probability_is_noticed(pair, monkeypatch, factor):
    honest = RoundKeys.block_uniform

    def scaled(keys, num_slots, purpose):
        values = honest(keys, num_slots, purpose)
        return values / factor if purpose == Purpose.ACCEPT else values

    monkeypatch.setattr(RoundKeys, "block_uniform", scaled)
    assert rejected(pair, PLAIN, run_trials(pair, PLAIN, POWERFUL, full_blocks=True))


def test_a_correction_from_the_target_itself_is_noticed(pair, monkeypatch):
    monkeypatch.setattr(acceptance_reference, "MIN_RESIDUAL_MASS", 2.0)
    assert rejected(pair, PLAIN, run_trials(pair, PLAIN, ENOUGH))


def test_one_noise_for_drafting_and_accepting_is_noticed(pair, monkeypatch):
    honest = RoundKeys.block_uniform
    monkeypatch.setattr(RoundKeys, "block_uniform", lambda keys, num_slots, _: honest(keys, num_slots, Purpose.DRAFT))
    assert rejected(pair, PLAIN, run_trials(pair, PLAIN, ENOUGH))


@pytest.mark.parametrize(
    ("drafted", "stored"),
    [
        (Rule(1.0), Rule(1.1)),
        (Rule(1.0, top_k=5), Rule(1.0)),
        (Rule(1.0, top_p=0.8), Rule(1.0)),
        (Rule(1.7, min_p=0.1), Rule(1.7)),
    ],
)
def test_a_stored_distribution_of_other_parameters_is_noticed(pair, drafted, stored):
    trials = run_trials(pair, drafted, ENOUGH, full_blocks=True, stored_distribution=pair.draft_distribution(stored))
    assert rejected(pair, drafted, trials)


def test_a_stored_distribution_of_bfloat16_logits_is_noticed():
    """At the magnitude of real logits bfloat16 rounds by several percent of a probability."""
    pair = SyntheticPair(gamma=1, logit_offset=40.0)
    coarse = pair.draft_logits().bfloat16().float().softmax(-1)
    assert rejected(
        pair, PLAIN, run_trials(pair, PLAIN, POWERFUL, anchor=3, full_blocks=True, stored_distribution=coarse)
    )
    assert not rejected(pair, PLAIN, run_trials(pair, PLAIN, POWERFUL, anchor=3, full_blocks=True))
