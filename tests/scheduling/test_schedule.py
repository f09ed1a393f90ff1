"""Tests of the schedule of a server: what can be had on it, and what it learns from rounds.

A request that runs alone is not drafted while it is beyond the drafter.
"""

import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from dspark_kernels import ASKED_ROWS
from step_tables import BLOCK, confidence, record, schedule, table, tokens

from sglang_dspark.config import DSparkConfig
from sglang_dspark.errors import ConfigError
from sglang_dspark.scheduling.forecast import UPDATE_STEPS, WINDOW_ROUNDS, Forecast, LaggedSurvivals, StepFeedback
from sglang_dspark.scheduling.online_calibration import OnlineCalibration
from sglang_dspark.scheduling.schedule import Schedule
from sglang_dspark.step.decision import PLAIN, StepDecision, StepRecord
from sglang_dspark.step.selection import FixedLength, TopDrafts, TopK
from sglang_dspark.step.state import DraftOutput


@pytest.mark.parametrize(
    ("options", "fields", "complaint"),
    [
        ({"gamma": 0, "with_table": False, "schedule": "off"}, {"policy": "auto"}, "without K/V slots"),
        ({"with_table": False, "schedule": "static"}, {"policy": "auto"}, "measured step times"),
        ({"with_table": False, "schedule": "static"}, {"policy": "early-stop"}, "measured step times"),
        ({"with_head": False}, {"policy": "threshold", "confidence_threshold": 0.5}, "confidence head"),
        ({}, {"policy": "static", "verify_len": 4}, "exceeds the 3 drafts"),
    ],
)
def test_policies_that_cannot_be_had_leave_the_old_one(options, fields, complaint):
    made = schedule(**options)
    before = made.policy
    with pytest.raises(ConfigError, match=complaint):
        made.switch(fields)
    assert made.policy is before


def test_early_stop_needs_a_length_of_each_request():
    made = schedule()
    made.start(table(), fixed_draft_shape=True, uniform=True)
    assert made.forecast.lagged.depths == (BLOCK,)
    assert "whole blocks of all" in made.why_not("early-stop")
    assert made.why_not("static") is made.why_not("auto") is None


def test_what_a_launched_step_reads_outlives_two_renewals():
    """One for statistics that are asked for, one with the result of the step before."""
    made = schedule(with_head=False)
    read = weakref.ref(made.forecast.packed_coefficients)
    for _ in range(2):
        before = made.forecast.packed_coefficients
        made.observe(record(StepDecision(BLOCK, FixedLength()), [BLOCK], [BLOCK]), [0], [1])
        made.report()
        assert made.forecast.packed_coefficients is not before
    del before
    assert read() is not None


def test_a_switch_takes_effect_at_once():
    made = schedule()
    assert made.choose(["a", "b"], 64.0).selection.max_drafts(0) is not None
    made.switch({"policy": "static", "verify_len": 2})
    assert made.choose(["a", "b"], 64.0) == StepDecision(2, FixedLength())
    made.switch({"policy": "off"})
    assert made.choose(["a", "b"], 64.0).draft_len == 0


def test_survival_is_the_product_of_calibrated_confidences():
    made = schedule()
    logits = torch.tensor([[0.0, 2.0, -1.0]])
    torch.testing.assert_close(made.forecast.predict(logits, 1, 3).survival, torch.sigmoid(logits).cumprod(1))
    torch.testing.assert_close(
        made.forecast.predict(logits[:, :2], 1, 2).survival, torch.sigmoid(logits[:, :2]).cumprod(1)
    )


def test_without_a_head_survival_follows_the_observed_acceptance():
    made = schedule(with_head=False)
    decision = StepDecision(BLOCK, TopK(4 * BLOCK))
    for _ in range(300):  # the first draft always, the second never
        made.observe(record(decision, [BLOCK] * 4, [BLOCK] * 4), [0, 1, 2, 3], [1] * 4)
    survival = made.forecast.predict(None, 2, BLOCK).survival
    assert survival.shape == (2, BLOCK)
    assert survival[0, 0] > 0.99
    assert survival[0, 1] < 0.01


def test_only_drafted_requests_that_still_run_are_learned_from():
    made = schedule()
    decision = StepDecision(BLOCK, TopK(BLOCK, probe_request=1), draft_requests=(1,))
    logits, survival = torch.zeros(3, BLOCK), torch.full((3, BLOCK), 0.5)
    step = record(decision, [0, BLOCK, 0], [0, BLOCK, 0], logits, survival)
    before = made.forecast.positions.conditional().copy()
    made.observe(step, [0, 2], [0, 0])  # the drafted one has ended
    made.forecast.update()
    assert (made.forecast.positions.conditional() == before).all()
    made.observe(step, [0, 1, 2], [0, BLOCK, 0])
    made.forecast.update()
    assert (made.forecast.positions.conditional() > before).all()
    assert made.forecast.calibration.report()["pairs"] == [1] * BLOCK


def test_rounds_in_which_a_preset_copied_say_nothing_about_the_drafter():
    """But how sure copies are, and with them survivals, is learned from them."""
    made = schedule()
    step = record(StepDecision(BLOCK, FixedLength()), [BLOCK], [BLOCK], torch.zeros(1, BLOCK))
    chains = torch.tensor([[ASKED_ROWS + 4, BLOCK, *[7] * (BLOCK + 1)]])
    positions, weights = made.forecast.positions.conditional().copy(), made.forecast.weights
    committed = torch.tensor([[5, *[-1] * BLOCK]])
    for _ in range(40):
        made.observe(replace(step, chains=chains, committed=committed), [0], [0])
    made.forecast.update()
    assert (made.forecast.positions.conditional() == positions).all()
    assert made.forecast.calibration.report()["pairs"] == [0] * BLOCK
    least, before = made.forecast.weights[1, ASKED_ROWS + 4], weights[1, ASKED_ROWS + 4]
    assert least[0] < before[0] - 2 and torch.equal(least[1:], before[1:])


def test_blocks_cut_short_are_learned_from_as_far_as_they_go():
    made = schedule()
    decision = StepDecision(2, TopK(2))
    for _ in range(200):
        made.observe(record(decision, [2], [2], torch.zeros(1, 2), torch.tensor([[0.5, 0.25]])), [0], [2])
    assert made.forecast.calibration.report()["pairs"] == [200, 200, 0]
    survival = made.forecast.predict(torch.zeros(1, BLOCK), 1, BLOCK).survival[0]
    assert survival[1] > 0.9
    assert survival[2] / survival[1] == pytest.approx(0.5)
    mean = made.forecast.lagged.mean()
    assert 0 < mean[2] < mean[1]


def test_calibration_can_be_frozen():
    made = schedule(online_calibration=False)
    decision = StepDecision(BLOCK, TopK(BLOCK))
    for _ in range(200):
        made.observe(record(decision, [BLOCK], [BLOCK], torch.full((1, BLOCK), 3.0), None), [0], [0])
    torch.testing.assert_close(
        made.forecast.predict(torch.zeros(1, BLOCK), 1, BLOCK).survival, torch.tensor([[0.5, 0.25, 0.125]])
    )


def outcome(decision, users, accepted=0):
    """A step of so many requests that verified the first one's block."""
    lens = [BLOCK] + [0] * (users - 1)
    return record(
        decision, [BLOCK] * users, lens, survival=torch.full((users, BLOCK), 0.5), logits=torch.zeros(users, BLOCK)
    )


def test_many_requests_are_learned_from_at_once():
    """Every 16th step of 256 requests is kept, plain ones counted; parking does not wait for eight."""
    made, decision = schedule(), StepDecision(BLOCK, TopK(BLOCK))
    seen = made.forecast.lagged
    note = lambda: made.observe(outcome(decision, 256), list(range(256)), [0] * 256)  # noqa: E731
    note()
    assert seen.num_observed == 256
    for _ in range(14):
        note()
    assert seen.num_observed == 256
    made.observe(record(PLAIN, [0] * 256, [0] * 256), list(range(256)), [0] * 256)
    note()
    assert seen.num_observed == 512
    # A parked server's probe is noted whenever it comes.
    made.observe(outcome(StepDecision(BLOCK, TopK(BLOCK), weight=4), 256), list(range(256)), [0] * 256)
    assert seen.num_observed == 768


@pytest.mark.parametrize("with_head", [True, False])
def test_the_first_rounds_of_a_lone_request_are_learned_from_one_by_one(with_head):
    made, counts = schedule(with_head=with_head), []
    for _ in range(16):
        made.observe(outcome(StepDecision(BLOCK, TopK(BLOCK)), 1), [0], [0])
        counts.append(made.forecast.lagged.num_observed)
    assert [counts[step] for step in (0, 1, 6, 7, 8, 15)] == [1, 2, 7, 8, 8, 16]


def test_calibration_knows_how_many_steps_have_passed(monkeypatch):
    """However many of them were noted."""
    made, told = schedule(), []
    monkeypatch.setattr(made.forecast.calibration, "observe", lambda *rounds, num_steps: told.append(num_steps))
    for _ in range(33):
        made.observe(outcome(StepDecision(BLOCK, TopK(BLOCK)), 256), list(range(256)), [0] * 256)
    assert told == [1, 16, 16]


def test_a_probe_of_a_whole_batch_shows_its_survivals_and_no_time(monkeypatch):
    made, timed = schedule(), []
    monkeypatch.setattr(made._clock, "end_step", timed.append)
    probe = StepDecision(BLOCK, TopK(BLOCK, probe_request=0), weight=8)
    for requests in (4, 1):
        made.end_step(probe, requests, requests + BLOCK)
    assert timed[0] is None and timed[1] is not None
    for users, shown in ((1, 8), (3, 9), (20, 20)):  # a lone request's survivals count as often as the probe
        before = made.forecast.lagged.num_observed
        made.observe(outcome(probe, users), list(range(users)), [0] * users)
        assert made.forecast.lagged.num_observed - before == shown


@pytest.mark.parametrize("with_head", [True, False])
@pytest.mark.parametrize("users", [1, 4])
def test_a_hopeless_drafter_parks_the_server_soon_and_a_good_one_brings_it_back(users, with_head):
    """However sure its head is. After the first look, 64 rounds, nothing that was believed before keeps it going.

    A lone request is left out by what its own rounds have shown, and the server may not see enough to park.
    """
    made, ids, rng = schedule(with_head=with_head), [f"r{index}" for index in range(users)], np.random.default_rng(0)
    rests = []
    for accepts, steps in ((0, 2000), (BLOCK, 4000)):
        for _ in range(steps):
            decision = made.choose(ids, 64.0)
            rests.append(made.parked if users > 1 else decision.draft_len == 0)
            made.invalidate()
            if decision.draft_len == 0:
                continue
            logits = torch.from_numpy(rng.normal(3.0, 1.0, (users, decision.draft_len))).float() if with_head else None
            foretold = made.forecast.predict(logits, users, decision.draft_len)
            drafted = DraftOutput(tokens(users, decision.draft_len), foretold, decision.draft_lens(users))
            lens = decision.select(drafted).verify_lens
            outcome = StepRecord(ids, decision, drafted.draft_lens, lens, foretold, None)
            made.observe(outcome, list(range(users)), np.minimum(lens.numpy(), accepts).tolist())
    bad, good = rests[:2000], rests[2000:]
    assert bad.index(True) <= 64 // users + UPDATE_STEPS
    assert np.mean(bad[bad.index(True) :]) > (0.9 if users == 1 else 0.9999)
    assert np.mean(good[-1000:]) < (0.1 if users == 1 else 0.0001)


def test_predicted_survivals_are_kept_with_what_came_of_them():
    made = schedule()
    survival = torch.tensor([[0.9, 0.6, 0.3], [0.8, 0.5, 0.1]])
    step = record(StepDecision(BLOCK, TopK(4)), [BLOCK] * 2, [3, 1], torch.zeros(2, BLOCK), survival)
    made.observe(step, [0, 1], [2, 1])
    made.forecast.update()
    drafts, predicted, survived = made.forecast.predicted.sums()
    assert drafts.tolist() == [2, 1, 1]
    assert predicted == pytest.approx([1.7, 0.6, 0.3])
    assert survived.tolist() == [2, 1, 0]


def test_the_time_of_a_step_is_known_when_the_next_one_is_chosen():
    for with_table in (True, False):
        made = schedule(with_table=with_table, schedule="static", verify_len=2)
        decision = made.choose(["a", "b"], 64.0)
        assert made.last_time is None
        made.end_step(decision, 2, 6)
        made.choose(["a", "b"], 64.0)
        assert made.last_time.requests == 2
        assert made.last_time.measured_ms > 0
        assert (made.last_time.expected_ms is None) == (not with_table)
        made.end_step(decision, 2, 6)
        made.invalidate()
        made.choose(["a", "b"], 64.0)
        assert made.last_time is None


def test_on_a_cpu_the_host_time_is_what_the_stages_do_not_take(monkeypatch):
    clock = iter([0.0, 0.001, 0.021, 0.030, 0.031])  # a step is chosen, staged, committed; the next is
    monkeypatch.setattr("sglang_dspark.scheduling.step_times.time.perf_counter", lambda: next(clock))
    made = schedule()
    made.end_step(made.choose(["a", "b"], 64.0), 2, 6)
    made.choose(["a", "b"], 64.0)
    assert made.last_time.measured_ms == pytest.approx(30)
    assert made.times.report()["host_ms"] == {"2": pytest.approx(10)}


@pytest.mark.parametrize(("lag", "host_ms"), [(0, 30 - 18), (1, 30 - 4)])
def test_on_a_gpu_the_host_time_is_what_it_neither_waits_nor_is_waited_for(monkeypatch, lag, host_ms):
    """Under overlap a step's result is read while the next one runs: all of the time but the wait is the host's."""
    now = [0.0]
    monkeypatch.setattr("sglang_dspark.scheduling.step_times.time.perf_counter", lambda: now[0])
    made = Schedule(DSparkConfig(), BLOCK, OnlineCalibration(BLOCK), torch.device("meta"), lag)
    made.start(table())
    for _ in range(lag + 1):
        made.end_step(made.choose(["a", "b"], 64.0), 2, 6)
        now[0] += 0.030
    made.processed(18.0, 4.0)
    made.choose(["a", "b"], 64.0)
    assert made.last_time.measured_ms == pytest.approx(30)
    assert made.times.report()["host_ms"] == {"2": pytest.approx(host_ms)}
    step_ms, host = made.times.step_ms(2, 64.0), host_ms / made.times.report()["common_factor"]
    assert step_ms.min() == pytest.approx(host) if lag else step_ms.min() > host


def test_a_step_whose_time_on_the_gpu_is_not_known_teaches_nothing(monkeypatch):
    made = Schedule(DSparkConfig(), BLOCK, OnlineCalibration(BLOCK), torch.device("meta"), 0)
    made.start(table())
    made.end_step(made.choose(["a", "b"], 64.0), 2, 6)
    made.choose(["a", "b"], 64.0)
    assert made.last_time.expected_ms is None
    assert made.times.report()["host_ms"] == {}


def test_a_plain_step_is_timed_as_one_however_many_rows_it_is_padded_to(monkeypatch):
    seen = []
    monkeypatch.setattr("sglang_dspark.scheduling.step_times.StepTimes.observe", lambda _, kind, *ms: seen.append(kind))
    made = schedule(schedule="off")
    made.end_step(made.choose(["a", "b", "c"], 64.0), 3, 4)
    made.choose(["a", "b", "c"], 64.0)
    assert [(kind.requests, kind.num_tokens, kind.depth) for kind in seen] == [(3, 3, 0)]


def test_auto_goes_on_where_it_was_after_another_policy():
    made = schedule()
    first = made.policy
    first.parked = True
    made.switch({"policy": "static"})
    made.switch({"policy": "auto"})
    assert made.policy is first
    assert made.parked


@pytest.fixture
def forecast():
    return Forecast(BLOCK, OnlineCalibration(BLOCK), adapts=True, device=torch.device("cpu"))


def test_a_draft_without_a_confidence_is_not_expected_to_survive(forecast):
    logits = torch.tensor([[0.0, torch.nan, 5.0], [torch.nan, 5.0, 5.0]])
    assert forecast.predict(logits, 2, BLOCK).survival.tolist() == [[0.5, 0.0, 0.0], [0.0, 0.0, 0.0]]


@pytest.mark.parametrize("budget", range(2 * BLOCK + 1))
def test_as_many_drafts_are_verified_as_the_step_has_rows_for(forecast, budget):
    logits = torch.tensor([[0.0, torch.nan, 5.0], [torch.nan, 5.0, 5.0]])
    best = TopDrafts(forecast.predict(logits, 2, BLOCK).survival, budget)
    assert int(best.verify_lens.sum()) == budget


def test_a_draft_without_a_confidence_is_not_believed_later_either(forecast, monkeypatch):
    """Whenever the calibration is fitted again, the rounds that budgets are based on are predicted again."""
    forecast.lagged = LaggedSurvivals(BLOCK, (BLOCK,))
    sizes, revise = [], forecast.lagged.revise
    monkeypatch.setattr(forecast.lagged, "revise", lambda rounds: (sizes.append(len(rounds)), revise(rounds)))
    logits, lens = torch.tensor([[0.0, torch.nan, 5.0], [torch.nan, 5.0, 5.0], [5.0, 5.0, 5.0]]), torch.full((3,), 3)
    decision = StepDecision(BLOCK, FixedLength())
    for _ in range(WINDOW_ROUNDS):
        confidence = forecast.predict(logits, 3, BLOCK)
        record = StepRecord(["a", "b", "c"], decision, [BLOCK] * 3, lens, confidence, None)
        forecast.observe(StepFeedback(record, [0, 1, 2], [3, 3, 3]))
    assert forecast.calibration.num_refits == len(sizes) > 1
    assert sizes[-1] == WINDOW_ROUNDS
    assert (forecast.lagged.mean() > 0.3).all()
    assert (forecast.lagged.mean() < [0.7, 0.35, 0.35]).all()


@pytest.mark.parametrize("with_head", [True, False])
def test_a_schedule_that_forgets_is_as_new(with_head):
    """Except the times of steps; a server that parked drafts again, and gives a worthless drafter up as a new one."""
    made, new = schedule(with_head=with_head), schedule(with_head=with_head)
    logits, survival = torch.zeros(4, BLOCK) if with_head else None, torch.full((4, BLOCK), 0.5)
    step = record(StepDecision(BLOCK, TopK(4 * BLOCK)), [BLOCK] * 4, [BLOCK] * 4, logits, survival)

    def learn(made, accepted):
        for _ in range(100):
            made.choose(step.requests, 64.0)
            made.observe(step, [0, 1, 2, 3], [accepted] * 4)
        made.forecast.update()
        return made.forecast.packed_coefficients, made.forecast.lagged.mean().tolist(), made.parked

    learn(made, 0)
    times = made.times
    made.forget()
    assert made.times is times and made.policy.name == "auto" and not made.parked
    assert made.forecast.packed_coefficients.equal(new.forecast.packed_coefficients)
    (learned, *state), (expected, *as_new) = learn(made, 1), learn(new, 1)
    assert learned.equal(expected) and state == as_new
    assert learn(new, 0)[2] == learn(made, 0)[2]


def test_temperatures_are_the_first_drafters():
    made = schedule()
    made.forecast.calibration = OnlineCalibration(BLOCK, (2.0, 2.0, 4.0))
    made.forget()
    assert made.forecast.calibration.scale.tolist() == [0.5, 0.5, 0.25]
    made.forget(new_drafter=True)
    assert made.forecast.calibration.scale.tolist() == [1.0] * BLOCK


EASY, HARD = [0.9, 0.8, 0.7], [0.01, 0.0, 0.0]


def serve_alone(made, name, survival, steps, accepted=None):
    """Return the decisions of a request's steps, nothing else running; its likely drafts are accepted, or so many."""
    choices, accepted = [], sum(np.array(survival) > 0.5) if accepted is None else accepted
    for _ in range(steps):
        decision = made.choose([name], 64.0)
        made.invalidate()
        choices.append(decision)
        depth = decision.draft_len
        foretold = confidence(torch.zeros(1, depth), torch.tensor([survival[:depth]])) if depth else None
        lens = torch.tensor([depth])
        made.observe(StepRecord([name], decision, [depth], lens, foretold, None), [0], [min(accepted, depth)])
    return choices


@pytest.mark.parametrize("fixed_draft_shape", [False, True])
def test_a_lone_request_beyond_the_drafter_is_left_undrafted(fixed_draft_shape):
    """However good the drafts of those before it were; the next one is drafted from its first step on."""
    made = schedule(online_calibration=False)
    made.fixed_draft_shape = made.policy.fixed_draft_shape = fixed_draft_shape
    assert all(decision.draft_len for decision in serve_alone(made, "easy", EASY, 200))
    plain = [decision.draft_len == 0 for decision in serve_alone(made, "hard", HARD, 100)]
    assert not made.parked
    assert not any(plain[:4])
    assert sum(plain[2 * UPDATE_STEPS :]) > 75
    assert not all(plain[UPDATE_STEPS:])  # it is tried again
    assert made.choose(["next"], 64.0).draft_len > 0


def test_a_lone_request_that_gets_easier_is_drafted_again_though_its_head_is_blind():
    made = schedule(online_calibration=False)
    serve_alone(made, "easy", EASY, 100)
    serve_alone(made, "r", HARD, 50)
    assert made.choose(["r"], 64.0).draft_len == 0
    drafted = [decision.draft_len > 0 for decision in serve_alone(made, "r", HARD, 100, accepted=BLOCK)]
    assert not made.parked
    assert sum(drafted) > 30
