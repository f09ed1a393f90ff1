"""A step in the median over the steps of a trace."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

from sglang_dspark.errors import ConfigError
from tracing.chrome import Activity
from tracing.stages import FORWARDS, STAGES, Step, split_steps


def summarise(activities: Sequence[Activity]) -> dict[str, Any]:
    """Return what the steps are made of; all figures are medians over the steps.

    Args:
        activities: by time of start.

    Returns:
        steps: complete ones in the trace.
        span_us: from the start of a step to that of the next.
        busy_us, busy_share: time in which an activity was under way, and its share of the span. An activity that waits
            while another program has the GPU is under way.
        gpu_us: GPU time of a step, as :func:`stage_times` says.
        outside_forwards_share: share of ``gpu_us`` that is neither the target's forward nor the drafter's network.
        graph_launches, kernel_launches, copy_launches: the latter two outside of graphs; memsets count as copies.
        activities: kernels, copies and memsets, those in graphs too.
        stages: by name, ``us`` and ``share`` of ``gpu_us``; ``launches`` of graphs and outside of them, a graph that is
            divided among stages in each; ``activities``.

    Raises:
        ConfigError: there is no complete step.
    """
    steps = split_steps(activities)
    if not steps:
        raise ConfigError("no complete step that CUDA graphs replay; profile a few steps more, of a server on a GPU")
    times = stage_times(steps)
    gpu_us = sum(times.values())
    busy = [busy_us(step.activities) for step in steps]
    all_activities = [step.activities for step in steps]
    return {
        "steps": len(steps),
        "span_us": median(step.span_us for step in steps),
        "busy_us": median(busy),
        "busy_share": median(part / step.span_us for part, step in zip(busy, steps, strict=True)),
        "gpu_us": gpu_us,
        "outside_forwards_share": 1 - sum(times[stage] for stage in FORWARDS) / gpu_us,
        "graph_launches": median(map(_graph_launches, all_activities)),
        "kernel_launches": median(_launches(part, copies=False) for part in all_activities),
        "copy_launches": median(_launches(part, copies=True) for part in all_activities),
        "activities": median(map(len, all_activities)),
        "stages": {stage: {"us": us, "share": us / gpu_us, **_counts(steps, stage)} for stage, us in times.items()},
    }


def stage_times(steps: Sequence[Step]) -> dict[str, float]:
    """GPU microseconds of every stage: for each of its activities the median over the steps, then their sum.

    The n-th activity of a name in a stage is compared with the n-th in the other steps, and takes no time in a step
    that has fewer. So a kernel that another program on the GPU interrupts in one step does not count as a long one,
    although some kernel may be interrupted in every step.
    """
    durations: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for step in steps:
        seen: Counter[tuple[str, str]] = Counter()
        for activity, stage in zip(step.activities, step.stages, strict=True):
            durations[stage, activity.name, seen[stage, activity.name]].append(activity.duration_us)
            seen[stage, activity.name] += 1
    times = dict.fromkeys(STAGES, 0.0)
    for (stage, _, _), values in durations.items():
        times[stage] += median([*values, *[0.0] * (len(steps) - len(values))])
    return times


def busy_us(activities: Sequence[Activity]) -> float:
    """Microseconds in which at least one of ``activities``, given by time of start, was under way."""
    total, end = 0.0, float("-inf")
    for activity in activities:
        stop = activity.start_us + activity.duration_us
        total += max(0.0, stop - max(end, activity.start_us))
        end = max(end, stop)
    return total


def _counts(steps: Sequence[Step], stage: str) -> dict[str, float]:
    parts = [
        [activity for activity, its in zip(step.activities, step.stages, strict=True) if its == stage] for step in steps
    ]
    launches = [_graph_launches(part) + _launches(part, copies=False) + _launches(part, copies=True) for part in parts]
    return {"launches": median(launches), "activities": median(map(len, parts))}


def _graph_launches(activities: Sequence[Activity]) -> int:
    return len({activity.graph for activity in activities} - {None})


def _launches(activities: Sequence[Activity], *, copies: bool) -> int:
    """Kernels, or copies and memsets, outside of graphs."""
    return sum(activity.graph is None and activity.is_copy == copies for activity in activities)
