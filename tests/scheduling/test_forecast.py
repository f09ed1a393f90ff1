"""Tests of forecasts: the best step, the value of a budget, and acceptance by position, against literal searches."""

import numpy as np
import pytest
from step_tables import GAMMA, compute_bound, random_table

from sglang_dspark.scheduling.auto_policy import evaluate_steps, worth_most_with
from sglang_dspark.scheduling.forecast import WINDOW_ROUNDS, LaggedSurvivals, PositionAcceptance
from sglang_dspark.scheduling.policies import ExtraRows
from sglang_dspark.scheduling.step_times import StepKind, StepTimes

ALL_DEPTHS = tuple(range(1, GAMMA + 1))


def knowledge(rng, table, depths=ALL_DEPTHS):
    survivals = LaggedSurvivals(GAMMA, depths)
    survivals.observe(rng.beta(5, 1, size=(300, GAMMA)).cumprod(1))
    return StepTimes(table), survivals


def rate(times, survivals, requests, num_tokens, depth, context):
    """Expected tokens per millisecond."""
    budget = min(num_tokens - requests, requests * GAMMA)
    gain = survivals.gains(requests)[survivals.depths.index(depth), budget]
    return (requests + gain) / times.table.step_ms(requests, num_tokens, depth, context)


@pytest.mark.parametrize("requests", [1, 2, 3, 8, 40])
@pytest.mark.parametrize("tiers", [(), (8, 12, 16, 24, 32, 64, 128, 256, 512)])
def test_the_best_step_is_the_best_of_all(requests, tiers):
    for seed in range(10):
        rng = np.random.default_rng(seed)
        depths = ALL_DEPTHS if seed % 2 else (GAMMA,)
        times, survivals = knowledge(rng, random_table(rng, tiers=tiers, contexts=(64,)), depths)
        context = float(rng.uniform(10, 2000))
        counts = times.table.times(requests).num_tokens
        assert set(counts.tolist()) <= set(tiers or range(requests, requests * (GAMMA + 1) + 1))
        rates = {(d, n): rate(times, survivals, requests, n, d, context) for d in depths for n in counts.tolist()}
        steps = evaluate_steps(times, survivals, requests, context)
        assert steps.best.tokens_per_ms == pytest.approx(max(rates.values()))
        assert rates[steps.best.depth, steps.best.num_tokens] == pytest.approx(max(rates.values()))

        assert (steps.plain.depth, steps.plain.num_tokens, steps.plain.committed) == (0, counts[0], requests)
        assert steps.plain.ms == pytest.approx(times.table.step_ms(requests, int(counts[0]), 0, context))


@pytest.mark.parametrize("requests", [1, 3, 8])
@pytest.mark.parametrize("tiers", [(), (8, 12, 16, 24, 32, 64, 128, 256, 512)])
def test_the_step_with_prompts_commits_the_most_beyond_what_its_time_is_worth(requests, tiers):
    for seed in range(10):
        rng = np.random.default_rng(seed)
        depths = ALL_DEPTHS if seed % 2 else (GAMMA,)
        times, survivals = knowledge(
            rng, random_table(rng, tiers=tiers, contexts=(64, 1024) if tiers else (64,)), depths
        )
        extra, worth, table = ExtraRows(4, 20 + seed, 300.0), float(rng.uniform(0.05, 3)), times.table

        def value(depth, drafts, times=times, survivals=survivals, extra=extra, worth=worth, table=table):
            gain = survivals.gains(requests)[survivals.depths.index(depth), drafts] if depth else 0.0
            rows = requests + drafts + extra.rows
            draft_ms = table.step_ms(requests, requests, depth, 64.0) - table.step_ms(requests, requests, 0, 64.0)
            mean = (requests * 64.0 + 4 * 300.0) / (requests + 4)
            return requests + gain - worth * (table.step_ms(requests + extra.requests, rows, 0, mean) + draft_ms)

        best = worth_most_with(times, survivals, requests, 64.0, extra, worth)
        drafts = best.num_tokens - requests
        assert 0 <= drafts <= requests * GAMMA
        values = [value(0, 0), *(value(d, n) for d in depths for n in range(requests * GAMMA + 1))]
        assert value(best.depth, drafts) == pytest.approx(max(values))
        assert best.committed - worth * best.ms == pytest.approx(max(values))

        mean = (requests * 64.0 + 4 * 300.0) / (requests + 4)
        least_ms = table.step_ms(requests + 4, requests + extra.rows, 0, mean)
        for bound_ms in (0.0, (least_ms + best.ms) / 2, best.ms):
            bound = extra._replace(bound_ms=bound_ms)
            bounded = worth_most_with(times, survivals, requests, 64.0, bound, worth)
            assert least_ms <= bounded.ms <= max(least_ms, bound_ms)
        assert bounded == best


@pytest.mark.parametrize("requests", [1, 8])
def test_no_step_drafts_and_verifies_nothing(requests):
    """A non-speculative step does as much, and what drafting has to bring would be measured by the cheapest drafts."""
    survivals = LaggedSurvivals(GAMMA, ALL_DEPTHS)
    survivals.observe(np.full((300, GAMMA), 1e-4))
    times = StepTimes(compute_bound())
    steps = evaluate_steps(times, survivals, requests, 300.0)
    assert times.table.times(requests).num_tokens[0] == requests < steps.best.num_tokens
    assert steps.best.tokens_per_ms < steps.plain.tokens_per_ms


@pytest.mark.parametrize("tiers", [(), (8, 16, 24, 40, 64)])
def test_the_best_step_for_each_number_of_drafts(tiers):
    rng = np.random.default_rng(0)
    times, survivals = knowledge(rng, random_table(rng, tiers=tiers, contexts=(64,)))
    requests, context = 8, 300.0
    steps = evaluate_steps(times, survivals, requests, context)
    plain, *speculative = steps.by_drafts
    assert plain == steps.plain
    for drafts, candidate in enumerate(speculative, start=1):
        if not tiers:
            assert candidate.num_tokens == requests * (1 + drafts)
        best = max(rate(times, survivals, requests, candidate.num_tokens, d, context) for d in ALL_DEPTHS)
        assert candidate.tokens_per_ms == pytest.approx(best)


def test_what_was_learned_about_a_step_counts():
    """The table says two drafts; the server learned that four take less time than they should."""
    rng = np.random.default_rng(0)
    times, survivals = knowledge(rng, compute_bound())
    before = evaluate_steps(times, survivals, 8, 300.0).best
    ignored = StepKind(8, 8 * 7, 6, 300.0)
    for step in range(300):
        kind = before.depth, before.num_tokens
        chosen = StepKind(8, kind[1], kind[0], 300.0)
        observed, factor = (ignored, 0.7) if step % 4 == 0 else (chosen, 1.0)
        times.observe(observed, factor * times.table.step_ms(8, observed.num_tokens, observed.depth, 300.0))
    after = evaluate_steps(times, survivals, 8, 300.0).best
    assert before.num_tokens < 8 * 5
    assert 8 * 6 < after.num_tokens <= 8 * 7.5


def test_nothing_is_trimmed_where_the_host_is_slower():
    """With a host that takes longer than any step of the device, drafts cost nothing; without, they do."""
    rng = np.random.default_rng(0)
    for host_ms, verifies_all in ((0.0, False), (1e4, True)):
        _, survivals = knowledge(rng, compute_bound())
        times = StepTimes(compute_bound(), overlapped=True)
        for drafts in (0, 2):
            kind = StepKind(8, 8 * (1 + drafts), drafts, 300.0)
            times.observe(kind, times.table.step_ms(8, kind.num_tokens, drafts, 300.0), host_ms)
        best = evaluate_steps(times, survivals, 8, 300.0).best
        assert (best.num_tokens == 8 * (GAMMA + 1)) == verifies_all


@pytest.mark.parametrize("requests", [1, 3, 20])
def test_where_all_verify_as_many_drafts_the_best_length_is_the_best_of_all(requests):
    lengths = (1, 3, GAMMA)
    for seed in range(10):
        rng = np.random.default_rng(seed)
        times, survivals = knowledge(rng, random_table(rng, contexts=(64,)), lengths)
        rates = {d: rate(times, survivals, requests, requests * (1 + d), d, 64.0) for d in lengths}
        steps = evaluate_steps(times, survivals, requests, 64.0, uniform=True)
        assert [(step.depth, step.num_tokens) for step in steps.by_drafts] == [
            (drafts, requests * (1 + drafts)) for drafts in (0, *lengths)
        ]
        assert [step.tokens_per_ms for step in steps.by_drafts[1:]] == pytest.approx(list(rates.values()))
        assert steps.best.depth == max(rates, key=rates.__getitem__)


SINGLE = 1e-6  # estimates are sums of float32


def random_rounds(rng, count, gamma=5):
    return rng.beta(3, 1, size=(count, gamma)).cumprod(1)


def worth(rounds, requests, depth, budget):
    """Mean, over batches of consecutive rounds, of the sum of the best survivals."""
    num_batches = max(1, min(WINDOW_ROUNDS, len(rounds)) // requests)
    sums = []
    for batch in range(num_batches):
        first = len(rounds) - (num_batches - batch) * requests
        cells = sorted((a for row in rounds[first : first + requests] for a in row[:depth]), reverse=True)
        sums.append(sum(cells[:budget]))
    return float(np.mean(sums))


@pytest.mark.parametrize("requests", [1, 2, 3, 7, 32, 100, 256, 300])
@pytest.mark.parametrize("depths", [(5,), (1, 2, 3, 4, 5)])
def test_gains_are_the_mean_of_the_best_over_batches(requests, depths):
    rng = np.random.default_rng(requests)
    rounds = random_rounds(rng, 400)
    survivals = LaggedSurvivals(5, depths)
    for chunk in np.split(rounds, 4):
        survivals.observe(chunk)
    kept = rounds[-WINDOW_ROUNDS:] if requests <= WINDOW_ROUNDS else np.resize(rounds[-WINDOW_ROUNDS:], (requests, 5))
    gains = survivals.gains(requests)
    assert gains.shape == (len(depths), requests * 5 + 1)
    for row, depth in zip(gains, depths, strict=True):
        for budget in {0, 1, 2, requests, requests * depth - 1, requests * depth, requests * 5}:
            assert row[budget] == pytest.approx(worth(kept, requests, depth, budget), rel=SINGLE)


def test_the_first_estimate_is_a_middling_drafter():
    survivals = LaggedSurvivals(3, (3,))
    assert survivals.num_observed == 0
    assert survivals.mean() == pytest.approx([0.7, 0.49, 0.343])
    for requests in (1, 2, 16, 64, 300):
        assert survivals.gains(requests)[0, -1] == pytest.approx(requests * (0.7 + 0.49 + 0.343), rel=SINGLE)


def test_the_first_estimate_soon_counts_for_little_and_then_for_nothing():
    survivals = LaggedSurvivals(2, (2,))
    survivals.observe(np.full((64, 2), 0.1))
    assert survivals.num_observed == 64
    assert survivals.mean()[0] == pytest.approx((64 * 0.1 + 16 * 0.7) / 80)
    survivals.observe(np.full((WINDOW_ROUNDS, 2), 0.1))
    assert survivals.mean() == pytest.approx([0.1, 0.1])


def test_only_the_last_rounds_count():
    survivals = LaggedSurvivals(2, (2,))
    survivals.observe(np.full((1000, 2), 0.9))
    survivals.observe(np.full((WINDOW_ROUNDS // 2, 2), 0.1))
    assert survivals.mean() == pytest.approx([0.5, 0.5])
    # requests beyond the window: as many rounds as there are
    survivals.observe(np.full((1000, 2), 0.3))
    assert survivals.gains(1000)[0, -1] == pytest.approx(600, rel=SINGLE)
    assert survivals.num_observed == 2000 + WINDOW_ROUNDS // 2


def test_a_new_round_is_seen_at_once():
    survivals = LaggedSurvivals(2, (2,))
    before = survivals.gains(4).copy()
    survivals.observe(np.zeros((4, 2)))
    assert (survivals.gains(4)[:, 1:] < before[:, 1:]).all()


def test_cut_blocks_are_completed_with_the_mean_ratio():
    survivals = LaggedSurvivals(3, (1, 2, 3))
    whole = np.tile([0.8, 0.4, 0.1], (WINDOW_ROUNDS, 1))
    survivals.observe(whole)
    cut = np.array([[0.6, np.nan, np.nan], [0.9, 0.9, np.nan]])
    survivals.observe(cut)
    assert np.isnan(cut).sum() == 3  # the argument is not written to
    expected = np.array([[0.6, 0.3, 0.075], [0.9, 0.9, 0.225]])
    mean = np.concatenate([whole[2:], expected]).mean(0)
    assert survivals.mean() == pytest.approx(mean)


def test_a_drafter_that_never_got_a_draft_through_divides_by_nothing():
    survivals = LaggedSurvivals(3, (3,))
    survivals.observe(np.zeros((WINDOW_ROUNDS, 3)))
    survivals.observe(np.array([[0.5, np.nan, np.nan]]))
    assert survivals.mean() == pytest.approx([0.5 / WINDOW_ROUNDS, 0, 0])
    assert np.isfinite(survivals.gains(3)).all()


def observe(positions, rng, conditional, rounds, batch=8, verified=None):
    gamma = len(conditional)
    for _ in range(rounds // batch):
        kept = (rng.random((batch, gamma)) < conditional).cumprod(1).sum(1)
        lens = np.full(batch, gamma) if verified is None else rng.integers(0, verified + 1, size=batch)
        positions.observe(lens, np.minimum(kept, lens))


def test_it_starts_in_the_middle():
    assert PositionAcceptance(3).conditional() == pytest.approx([0.7, 0.7, 0.7])


def test_only_drafts_that_were_put_to_the_test_are_judged():
    positions = PositionAcceptance(4)
    positions.observe(np.array([4, 4, 2, 0]), np.array([4, 1, 2, 0]))
    # position 0: 3 of 3; 1: 2 of 3 (the second round failed there); 2: 1 of 1; 3: 1 of 1
    prior, judged, kept = 16.0, np.array([3, 3, 1, 1]), np.array([3, 2, 1, 1])
    faded = prior * np.exp(-judged / 256)
    assert positions.conditional() == pytest.approx((0.7 * faded + kept) / (faded + judged))


@pytest.mark.parametrize("verified", [None, 4])
def test_it_converges_however_much_is_verified(verified):
    conditional = np.array([0.9, 0.6, 0.8, 0.3])
    positions = PositionAcceptance(4)
    observe(positions, np.random.default_rng(0), conditional, 20_000, verified=verified)
    assert positions.conditional() == pytest.approx(conditional, abs=0.1)


def test_it_forgets():
    positions, rng = PositionAcceptance(1), np.random.default_rng(0)
    observe(positions, rng, [0.9], 5000)
    observe(positions, rng, [0.2], 256)
    assert positions.conditional()[0] == pytest.approx(0.2 + 0.7 / np.e, abs=0.08)
    observe(positions, rng, [0.2], 2000)
    assert positions.conditional()[0] == pytest.approx(0.2, abs=0.08)


def test_positions_that_are_never_verified_keep_what_they_have():
    positions, rng = PositionAcceptance(3), np.random.default_rng(0)
    observe(positions, rng, [0.9, 0.9, 0.9], 800)
    before = positions.conditional()
    observe(positions, rng, [0.0, 0.0, 0.0], 800, verified=1)
    assert positions.conditional()[0] < 0.4
    assert positions.conditional()[1:].tolist() == before[1:].tolist()


def test_nothing_is_learned_from_nothing():
    positions = PositionAcceptance(2)
    positions.observe(np.zeros(3, np.int64), np.zeros(3, np.int64))
    assert positions.conditional() == pytest.approx([0.7, 0.7])
