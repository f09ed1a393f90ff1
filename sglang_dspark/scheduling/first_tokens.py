"""Promises of a time to first token: the order in which prompts that wait have to start."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import TypeAlias

# What a request without a promise counts as promised: none of them waits for ever behind others that have one.
PATIENCE_MS = 10_000.0

Due: TypeAlias = tuple[int, float]
"""Level of priority, the smallest first, and by when a prompt has to start, in milliseconds of any monotonic clock."""


def starting_order(waiting: int, promised: Mapping[int, Due], due: Callable[[int], Due], *, by_age: bool) -> list[int]:
    """Return the places of prompts that wait, in the order in which they have to start.

    Of prompts without a promise, none has to start before one in front of it: these keep their order, and all of them
    wait no longer than the oldest one may.

    Args:
        waiting: number of prompts.
        promised: when those have to start that do not keep their order, by their places.
        due: returns when the one of another place has to start.
        by_age: whether these others are in the order of that already; then few of them are looked at.
    """
    others = [place for place in range(waiting) if place not in promised]
    if not by_age:
        due = dict(zip(reversed(others), accumulate(map(due, reversed(others)), min), strict=True)).__getitem__
    order, begin = [], 0
    for place in sorted(promised, key=promised.__getitem__):
        end = bisect_right(others, promised[place], begin, key=due)
        order += [*others[begin:end], place]
        begin = end
    return order + others[begin:]
