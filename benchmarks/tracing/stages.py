"""To which stage of which decode step a GPU activity belongs.

A step begins with the kernel that stages its requests (``prepare``) and ends where the next one begins, so what the
scheduler launches ahead of a step counts to the one before.

A graph is known by our own kernels in it, and their places divide it. The draft graph: the network with the LM head,
the walk through the Markov head, and behind that the confidences with their calibration. A graph that judges: the
target's forward where it has one, the verdict, and behind that the projection and writing of the draft K/V. Any other
graph is a forward of the target. The plan is known by its name in all of them, as every kernel of ours is around them.
A forward that is launched kernel by kernel (prefill, steps too large for the graphs) is ``other``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tracing.chrome import Activity

TARGET = "target forward"
DRAFTER = "drafter network"
WALK = "Markov walk"
CONFIDENCE = "confidence"
PREPARE = "prepare"
PLAN = "plan"
ACCEPT = "accept"
COMMIT = "commit"
COPIES = "copies"
OTHER = "other"
STAGES = (PREPARE, DRAFTER, WALK, CONFIDENCE, PLAN, TARGET, ACCEPT, COMMIT, COPIES, OTHER)
FORWARDS = (TARGET, DRAFTER)

KERNEL_STAGES = {
    "_prepare_kernel": PREPARE,
    "choose_kernel": WALK,
    "_block_confidence_kernel": CONFIDENCE,
    "_plan_kernel": PLAN,
    "_adjust_kernel": ACCEPT,
    "row_stats_kernel": ACCEPT,
    "filter_kernel": ACCEPT,
    "seeded_kernel": ACCEPT,
    "judge_kernel": ACCEPT,
    "race_kernel": ACCEPT,
    "finish_kernel": ACCEPT,
    "_kv_inject_kernel": COMMIT,
}
"""Kernels of ``dspark_kernels`` that work for one stage only, by the names that they have in a trace."""


@dataclass(frozen=True)
class Step:
    """A decode step that is in the trace from its beginning to the next one's.

    Attributes:
        activities: by time of start.
        stages: of each of them, one of :data:`STAGES`.
        span_us: microseconds until the next step begins.
    """

    activities: list[Activity]
    stages: list[str]
    span_us: float


def split_steps(activities: Sequence[Activity]) -> list[Step]:
    """The complete steps; what precedes the first beginning and follows the last belongs to none.

    Args:
        activities: by time of start.
    """
    starts = [place for place, activity in enumerate(activities) if _stage_by_name(activity) == PREPARE]
    return [
        Step(
            activities=list(activities[start:end]),
            stages=_stages(activities[start:end]),
            span_us=activities[end].start_us - activities[start].start_us,
        )
        for start, end in pairwise(starts)
    ]


def _stages(activities: Sequence[Activity]) -> list[str]:
    graphs: dict[int, list[int]] = {}
    found = [OTHER] * len(activities)
    for place, activity in enumerate(activities):
        if activity.graph is not None:
            graphs.setdefault(activity.graph, []).append(place)
        else:
            found[place] = COPIES if activity.is_copy else _stage_by_name(activity)
    for places in graphs.values():
        for place, stage in zip(places, _stages_of_graph([activities[place] for place in places]), strict=True):
            found[place] = stage
    return found


def _stages_of_graph(replayed: Sequence[Activity]) -> list[str]:
    named = [_stage_by_name(activity) for activity in replayed]
    if WALK in named:
        return _divided(named, DRAFTER, WALK, CONFIDENCE)
    if ACCEPT in named:
        return _divided(named, TARGET, ACCEPT, COMMIT)
    return [TARGET] * len(named)


def _divided(named: Sequence[str], before: str, stage: str, after: str) -> list[str]:
    """``stage`` from its first kernel to its last; a plan is in no stage's share."""
    first, last = named.index(stage), len(named) - 1 - named[::-1].index(stage)
    shares = [before] * first + [stage] * (last + 1 - first) + [after] * (len(named) - 1 - last)
    return [PLAN if name == PLAN else share for name, share in zip(named, shares, strict=True)]


def _stage_by_name(activity: Activity) -> str:
    return KERNEL_STAGES.get(activity.name, OTHER)
