"""Measures the SPS table at start-up. The steps to time are passed in as callables."""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sglang_dspark.scheduling.sps_table import SpsTable, along

# The median of three passes survives one hiccup of the machine, that of five survives two.
MIN_PASSES = 3
MAX_PASSES = 5
# To launch a step into an empty queue, and to wait for it, takes tens of microseconds that no served step takes: less
# than 1 % of one that is not short. Short ones are therefore run several times per wait.
_SHORT_MS = 4.0
_RUNS_PER_WAIT = 4


class SteppedLoad(Protocol):
    """A fixed load whose steps can be run any number of times."""

    def draft(self, depth: int) -> None:
        """Propose ``depth`` drafts per request."""

    def verify(self, drafts: int) -> None:
        """Verify and commit ``drafts`` drafts per request; 0 is a plain step."""


Progress = Callable[[int, int, float], None]
"""Called after each pass with (passes done, passes at most, seconds since the start)."""


def timed_drafts(most: int) -> list[int]:
    """Return the numbers of drafts up to ``most`` that are measured: of long blocks, every fourth."""
    return sorted({*range(min(most, 8) + 1), *range(12, most, 4), most})


def measure(  # noqa: PLR0913 - what is measured, and how long it may take
    load: Callable[[int, int], SteppedLoad],
    *,
    key: Mapping[str, str],
    requests: Sequence[int],
    drafts: Sequence[int],
    contexts: Sequence[int],
    limit_s: float,
    tiers: Sequence[int] = (),
    monotone: bool = False,
    progress: Progress | None = None,
    wait: Callable[[], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> SpsTable:
    """Time every cell of the grid several times, in passes over the whole grid, and keep the medians.

    A pass visits all cells before any cell is timed again, so that a busy moment of the machine falls on single samples
    of many cells and not on all samples of one.

    Args:
        load: ``load(requests, context)`` prepares a load.
        drafts: numbers of drafts per request from 0 on; between them, times are interpolated.
        limit_s: seconds to spend. Further passes are left out, and, if the first one takes too long, the largest
            request counts, which are then extrapolated.
        monotone: more tokens, requests or context never take less time here, so that a cell above a larger one is noise
            and is lowered to it. Not so if some shapes run in CUDA graphs and others do not.
        wait: returns when the device has finished; None if calls return no sooner.
        clock: seconds, for the limit; of the ranks of one server, all must read the same time.
    """
    started = clock()

    def spent() -> float:
        return clock() - started

    requests = list(requests)
    shape = (len(requests), len(drafts), len(contexts))
    samples = {kind: np.zeros((MAX_PASSES, *shape)) for kind in ("draft", "verify")}  # 0 for no drafts
    for done in range(MAX_PASSES):
        for (r, count), (c, context) in itertools.product(list(enumerate(requests)), enumerate(contexts)):
            # Two are the least that a slope can be had from.
            if done == 0 and count not in requests[:2] and spent() > limit_s / 2:
                requests = [n for n in requests if n < count]
                break
            steps = load(count, context)
            for d, num_drafts in enumerate(drafts):
                for kind, step in (("draft", steps.draft), ("verify", steps.verify)):
                    if num_drafts > 0 or kind == "verify":
                        elapsed = _time(partial(step, num_drafts), wait, clock, warm_up=done == 0)
                        samples[kind][done, r, d, c] = elapsed
        if progress is not None:
            progress(done + 1, MAX_PASSES, spent())
        # The first pass runs everything twice.
        next_ends = spent() * (1 + 1 / (done + 2))
        if next_ends > limit_s and (done + 1 >= MIN_PASSES or spent() > limit_s):
            break
    times = {kind: np.median(taken[: done + 1, : len(requests)], axis=0) for kind, taken in samples.items()}
    if monotone:
        # Drafting nothing takes no time by definition, so the drafts' axis of `draft` starts at one.
        times = {"draft": times["draft"], "verify": _lower_to_larger(times["verify"])}
        times["draft"][:, 1:] = _lower_to_larger(times["draft"][:, 1:])
    return SpsTable(
        key=dict(key),
        requests=requests,
        drafts=list(range(drafts[-1] + 1)),
        contexts=list(contexts),
        draft_ms=_with_those_between(times["draft"], drafts),
        verify_ms=_with_those_between(times["verify"], drafts),
        tiers=list(tiers),
    )


def _lower_to_larger(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Lower every cell to the smallest one that is at least as far along all axes."""
    for axis in range(values.ndim):
        values = np.flip(np.minimum.accumulate(np.flip(values, axis), axis), axis)
    return values


def _with_those_between(values: NDArray[np.float64], drafts: Sequence[int]) -> NDArray[np.float64]:
    """Return [requests, drafts[-1] + 1, contexts] of values [requests, len(drafts), contexts]."""
    every = np.arange(drafts[-1] + 1, dtype=np.float64)
    return along(values.swapaxes(0, 1), drafts, every).swapaxes(0, 1)


def _time(
    run: Callable[[], None], wait: Callable[[], None] | None, clock: Callable[[], float], *, warm_up: bool
) -> float:
    """Return the milliseconds of one run. The first run of a shape pays for allocations, compilations and cold caches.

    Args:
        clock: seconds; by this one, all ranks of a server agree that a run is short, and repeat it.
    """
    if warm_up:
        _run(run, wait, 1)
    began = clock()
    elapsed_ms = _run(run, wait, 1)
    if wait is not None and (clock() - began) * 1e3 < _SHORT_MS:
        elapsed_ms = _run(run, wait, _RUNS_PER_WAIT)
    return elapsed_ms


def _run(run: Callable[[], None], wait: Callable[[], None] | None, times: int) -> float:
    """Return the milliseconds of each of several runs, one after the other."""
    before = time.perf_counter()
    for _ in range(times):
        run()
    if wait is not None:
        wait()
    return (time.perf_counter() - before) * 1e3 / times
