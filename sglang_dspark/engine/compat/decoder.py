"""Finds what decodes in a scheduler: our worker, or our schedule of SGLang's own."""

from __future__ import annotations

from typing import Any

_SCHEDULE = "dspark_schedule"


def attach_schedule(schedule: Any, *parts: Any) -> None:
    """Put the schedule on SGLang's worker, and on the parts of it that are hooked."""
    for part in parts:
        setattr(part, _SCHEDULE, schedule)


def schedule_of(part: Any) -> Any:
    """Return what :func:`attach_schedule` put there."""
    return getattr(part, _SCHEDULE)


def decoder_of(scheduler: Any) -> Any:
    """Return what answers for SGLang's scheduler."""
    worker = scheduler.draft_worker
    return getattr(worker, _SCHEDULE, worker)
