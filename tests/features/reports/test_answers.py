"""Answers of several replicas: what one server would have counted, and each replica beside it."""

import numpy as np
import pytest

from sglang_dspark.calibration.predicted_survival import PredictedSurvival
from sglang_dspark.features.reports import answers
from sglang_dspark.features.reports.counters import Counters
from sglang_dspark.features.reports.recent import Recent
from sglang_dspark.features.reports.versions import Versions
from sglang_dspark.step.record import TimedStep

GAMMA = 3


class Replica:
    """Counts steps, and answers as a scheduler does."""

    def __init__(self, **state):
        self.predicted = PredictedSurvival(GAMMA)
        self.counters, self.state, self.now = Counters(GAMMA, self.predicted), state, 10.0
        self.recent = Recent(self.counters, clock=lambda: self.now)

    def step(self, verified, accepted, policy="auto"):
        self.counters.record([GAMMA] * len(verified), verified, accepted, policy=policy)
        self.counters.record_time(TimedStep(len(verified), 10.0 * len(verified), 9.0))
        self.predicted.observe(np.full((len(verified), GAMMA), 0.5), np.array(verified), np.array(accepted))
        return self

    def answer(self):
        versions = Versions(("default", ""))
        if "bad" in self.state:
            versions.first_drafts.counts |= {"verified": 80, "accepted": 2, "promises": 80, "promised": 64.0}
        return {
            "state": {"policy": "auto", **self.state},
            "uptime_s": self.now - 10.0,
            "versions": versions.counts,
            "sums": self.counters.sums().lists(),
            "recent": self.recent.report(),
            "counted": {
                "promises": {"kept": 1, "late": 2},
                "failed_advice": {"presets": 2},
                "steps_by_policy": dict(self.counters.steps_by_policy),
            },
            "until_now": {"uptime_s": self.now - 10.0, **self.counters.sums().total().counts()},
        }


BUSY, IDLE = ([3, 2], [1, 2]), ([1], [0])


def test_figures_of_two_replicas_are_those_of_one_that_counts_both():
    one, other, both = Replica(), Replica(), Replica()
    for replica, step in ((one, BUSY), (one, IDLE), (other, BUSY)):
        replica.step(*step)
        both.step(*step)
    for replica in (one, other, both):
        replica.now = 14.0
    expected = answers.stats([both.answer()])
    found = answers.stats([one.answer(), other.answer()])
    assert found.pop("replicas") == [answers.stats([replica.answer()]) for replica in (one, other)]
    assert found.pop("failed_advice") == {"presets": 4}
    assert found.pop("promises") == {"kept": 2, "late": 4}
    assert found == {name: value for name, value in expected.items() if name not in ("failed_advice", "promises")}
    assert found["recent"]["tokens_per_s"] == pytest.approx(found["committed_tokens"] / 4)


def test_a_state_is_told_if_all_have_it():
    found = answers.stats([Replica(schedule={"probes": n}).answer() for n in (1, 2)])
    assert found["policy"] == "auto" and "schedule" not in found
    assert [replica["schedule"] for replica in found["replicas"]] == [{"probes": 1}, {"probes": 2}]
    assert answers.capabilities([{"a": 1, "most": 8}, {"a": 1, "most": 9}])["a"] == 1


def test_a_drafter_is_judged_by_the_drafts_of_all():
    one = answers.stats([Replica(bad=True).answer()])["drafter_fit"]
    both = answers.stats([Replica(bad=True).answer(), Replica(bad=True).answer()])["drafter_fit"]
    assert (one["first_drafts"], both["first_drafts"]) == (80, 160)
    assert one["promised"] == both["promised"] == pytest.approx(0.8)
    assert both["verdict"] == "misfit"


def test_a_switch_counts_what_all_have_done():
    one, other = Replica().step(*BUSY), Replica().step(*IDLE)
    other.now = 17.0
    found = answers.switched([one.answer(), other.answer()])
    assert (found["policy"], found["until_now"]["steps"], found["until_now"]["uptime_s"]) == ("auto", 2, 7.0)
    # A count of nothing is told, too.
    assert found["until_now"]["parked_steps"] == 0
    assert [replica["until_now"]["rounds"] for replica in found["replicas"]] == [2, 1]
