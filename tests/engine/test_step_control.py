"""Tests that rank 0's values end up on every rank, and that features see the outcome of a step."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import FINISH_LENGTH
from sglang_objects import ONE_RANK, request
from stage_loop import OneRank
from step_tables import BLOCK, record, schedule

from sglang_dspark.engine.agreement import Agreement
from sglang_dspark.engine.part import Part
from sglang_dspark.engine.step_control import StepControl
from sglang_dspark.step.decision import StepDecision
from sglang_dspark.step.selection import FixedLength


class Group:
    """The part of SGLang's ``GroupCoordinator`` that ``Agreement`` uses; the wire is a queue between two ranks."""

    world_size = 2

    def __init__(self, rank: int, wire: deque[Any]) -> None:
        self._rank, self._wire = rank, wire

    def broadcast_object(self, value: Any) -> Any:
        if self._rank == 0:
            self._wire.append(value)
            return value
        return self._wire.popleft()

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.copy_(self.broadcast_object(tensor.clone()))


def test_the_others_take_over_rank_zeros_values_in_one_broadcast():
    wire: deque[Any] = deque()
    leader, follower = (Agreement(Group(rank, wire)) for rank in (0, 1))
    tokens, lens = torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([3, 1])
    own_tokens, own_lens = torch.zeros(2, 3, dtype=torch.int64), torch.tensor([0, 7])

    leader.broadcast_from_rank0(tokens, lens)
    assert len(wire) == 1
    follower.broadcast_from_rank0(own_tokens, own_lens)
    assert own_tokens.equal(tokens) and own_lens.equal(lens)
    assert leader.share({"depth": 7}) == follower.share({"depth": 0}) == {"depth": 7}


def test_nothing_to_adopt_is_not_broadcast():
    wire: deque[Any] = deque()
    Agreement(Group(0, wire)).broadcast_from_rank0(None)
    assert not wire


def test_one_rank_keeps_its_own():
    alone, tensor, value = Agreement(ONE_RANK), torch.tensor([1, 2]), object()
    alone.broadcast_from_rank0(tensor)
    assert tensor.tolist() == [1, 2]
    assert alone.share(value) is value


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
    done = record(StepDecision(BLOCK, FixedLength()), [BLOCK] * 3, [BLOCK] * 3)
    control.observe([req(ended=False), req(ended=True), req(ended=False)], done, [3, 1, 1], None)
    control.observe([req(ended=True)] * 3, done, [1, 1, 1], None)
    assert parts[0].seen == parts[2].seen == [(done, [0, 2], [2, 0]), (done, [], [])]
