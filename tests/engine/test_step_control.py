"""Features look at the outcome of a step."""

from made_schedule import GAMMA, record, schedule
from sglang.srt.managers.schedule_batch import FINISH_LENGTH
from sglang_objects import request
from stage_loop import OneRank

from sglang_dspark.engine.part import Part
from sglang_dspark.engine.step_control import StepControl
from sglang_dspark.step.decision import StepDecision
from sglang_dspark.step.selection import FixedLength


class Looking(Part):
    def __init__(self):
        self.seen = []

    def step_done(self, reqs, record, running, accepted):
        self.seen.append((record, running, accepted))


def req(*, ended):
    made = request()
    made.finished_reason = FINISH_LENGTH(1) if ended else None
    return made


def test_features_see_every_step_and_of_its_requests_those_that_got_its_tokens():
    parts = [Looking(), Part(), Looking()]
    control = StepControl(schedule(), OneRank(), parts, on_gpu=False)
    done = record(StepDecision(GAMMA, FixedLength()), [GAMMA] * 3, [GAMMA] * 3)
    control.observe([req(ended=False), req(ended=True), req(ended=False)], done, [3, 1, 1], None)
    control.observe([req(ended=True)] * 3, done, [1, 1, 1], None)
    assert parts[0].seen == parts[2].seen == [(done, [0, 2], [2, 0]), (done, [], [])]
