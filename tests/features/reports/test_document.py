"""Answers of several replicas: what one server would have counted, and each replica beside it."""

import numpy as np
import pytest

from sglang_dspark.features.reports.counters import Counters, Versions
from sglang_dspark.features.reports.routes import in_common, stats, with_each
from sglang_dspark.scheduling.online_calibration import PredictedSurvival
from sglang_dspark.step.decision import TimedStep

GAMMA = 3


class Replica:
    """Counts steps, and answers as a scheduler does."""

    def __init__(self, **state):
        self.predicted = PredictedSurvival(GAMMA)
        self.counters, self.state, self.uptime_s = Counters(GAMMA, self.predicted), state, 4.0

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
            "uptime_s": self.uptime_s,
            "versions": versions.counts,
            "sums": self.counters.sums().lists(),
            "counted": {
                "slos": {"met": 1, "missed": 2},
                "failed_advice": {"presets": 2},
                "steps_by_policy": dict(self.counters.steps_by_policy),
            },
        }


BUSY, IDLE = ([3, 2], [1, 2]), ([1], [0])


def test_figures_of_two_replicas_are_those_of_one_that_counts_both():
    one, other, both = Replica(), Replica(), Replica()
    for replica, step in ((one, BUSY), (one, IDLE), (other, BUSY)):
        replica.step(*step)
        both.step(*step)
    other.uptime_s = 3.0
    expected = stats([both.answer()])
    found = with_each(stats, [one.answer(), other.answer()])
    assert found.pop("replicas") == [stats([replica.answer()]) for replica in (one, other)]
    assert found.pop("failed_advice") == {"presets": 4}
    assert found.pop("slos") == {"met": 2, "missed": 4}
    assert found == {name: value for name, value in expected.items() if name not in ("failed_advice", "slos")}


def test_a_state_is_told_if_all_have_it():
    found = with_each(stats, [Replica(schedule={"probes": n}).answer() for n in (1, 2)])
    assert found["policy"] == "auto" and "schedule" not in found
    assert [replica["schedule"] for replica in found["replicas"]] == [{"probes": 1}, {"probes": 2}]
    assert in_common([{"a": 1, "most": 8}, {"a": 1, "most": 9}]) == {"a": 1}


def test_a_drafter_is_judged_by_the_drafts_of_all():
    one = stats([Replica(bad=True).answer()])["drafter_fit"]
    both = stats([Replica(bad=True).answer(), Replica(bad=True).answer()])["drafter_fit"]
    assert (one["first_drafts"], both["first_drafts"]) == (80, 160)
    assert one["promised"] == both["promised"] == pytest.approx(0.8)
    assert both["verdict"] == "misfit"
