"""The table SPS(B): how long a decode step takes for a given load, and its measurement at start-up.

The paper's SPS(B) (DSpark, 3.2.2), steps per second at B verified tokens, is one over :meth:`SpsTable.step_ms`. Ours
has the dimensions that the step time really depends on: requests, tokens per request, and context.

The steps to time are passed in as callables.
"""

from __future__ import annotations

import itertools
import json
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from sglang_dspark.errors import ConfigError
from sglang_dspark.files import atomic_write_text

FORMAT_VERSION = 1


@dataclass(frozen=True)
class SpsTable:
    """Measured times on a grid; :meth:`times` interpolates.

    Attributes:
        key: what the numbers hold for (hardware, versions, checkpoints, options), see :meth:`mismatch`.
        requests: grid of requests per step, ascending from 1.
        drafts: grid of drafts per request, 0 to gamma.
        contexts: grid of context tokens per request, ascending.
        draft_ms: [requests, drafts, contexts] milliseconds to propose that many drafts; 0 for none.
        verify_ms: [requests, drafts, contexts] milliseconds to verify and commit with that many drafts per request; the
            column of 0 drafts is the non-speculative step.
        tiers: token counts that the verify forward was captured with, ascending; empty if any count is run as it is.
            What is larger than all of them is launched kernel by kernel, and its time comes from the grid of drafts.
    """

    key: Mapping[str, str]
    requests: Sequence[int]
    drafts: Sequence[int]
    contexts: Sequence[int]
    draft_ms: NDArray[np.float64]
    verify_ms: NDArray[np.float64]
    tiers: Sequence[int] = ()

    def __post_init__(self) -> None:
        shape = (len(self.requests), len(self.drafts), len(self.contexts))
        for name in ("requests", "drafts", "contexts", "tiers"):
            axis = list(getattr(self, name))
            if axis != sorted(set(axis)) or (name != "tiers" and not axis):
                raise ConfigError(f"SPS table: {name}={axis} must be a strictly ascending list")
        if self.requests[0] != 1:
            raise ConfigError(f"SPS table: requests={list(self.requests)} must start at 1")
        if list(self.drafts) != list(range(len(self.drafts))) or len(self.drafts) < 2:
            raise ConfigError(f"SPS table: drafts={list(self.drafts)} must be 0, 1, ... gamma")
        for name in ("draft_ms", "verify_ms"):
            values = getattr(self, name)
            if values.shape != shape or not np.isfinite(values).all() or (values < 0).any():
                raise ConfigError(f"SPS table: {name} must be {list(shape)} finite, non-negative milliseconds")
        if (self.verify_ms <= 0).any():
            raise ConfigError("SPS table: verify_ms must be positive")

    @property
    def gamma(self) -> int:
        """Return the drafts per block."""
        return self.drafts[-1]

    @cached_property
    def _by_load(self) -> dict[int, LoadTimes]:
        return {}

    def monotone(self) -> SpsTable:
        """Return the table without its errors of measurement: no step is slower than another with more drafts.

        Of steps that contradict each other the (lower) median counts, so that one that is far off, either way, moves no
        other one far. Only a non-speculative step may be pulled down by the next one: nothing says which of the two is
        wrong.
        """
        verify_ms, numbers = np.zeros_like(self.verify_ms), range(self.verify_ms.shape[1])
        for first in numbers:
            parts = [self.verify_ms[:, first : last + 1] for last in numbers[first:]]
            medians = [np.quantile(part, 0.5, axis=1, method="lower") for part in parts]
            # Of each number of drafts, over all that are no smaller.
            least = np.minimum.accumulate(medians[::-1], axis=0)[::-1]
            verify_ms[:, first:] = np.maximum(verify_ms[:, first:], np.moveaxis(least, 0, 1))
        return replace(self, verify_ms=verify_ms)

    def times(self, requests: int) -> LoadTimes:
        """Return the times of every step that ``requests`` requests can take.

        Beyond the grid the last slope goes on, unless it falls: then it is noise of the measurement.
        """
        if requests not in self._by_load:
            self._by_load[requests] = LoadTimes.of(self, requests)
        return self._by_load[requests]

    def step_ms(self, requests: int, num_tokens: int, depth: int, context: float) -> float:
        """Return the milliseconds of a step, by the tokens of its verify forward and the mean context of a request."""
        times = self.times(requests)
        return float(times.at(context, (depth, times.room_for(num_tokens))))

    def mismatch(self, key: Mapping[str, str]) -> str | None:
        """Return the first difference between this table's key and ``key`` in words; None if they agree."""
        for name in sorted(set(self.key) | set(key)):
            # A property that a server does not have may be missing, too.
            ours, theirs = self.key.get(name, "none"), key.get(name, "none")
            if ours != theirs:
                return f"{name} was {ours!r} when it was measured and is {theirs!r} now"
        return None

    def save(self, path: str | Path) -> None:
        """Write the table as JSON."""
        content = {
            "format": "sglang-dspark SPS table",
            "version": FORMAT_VERSION,
            "key": dict(self.key),
            "requests": list(self.requests),
            "drafts": list(self.drafts),
            "contexts": list(self.contexts),
            "draft_ms": np.round(self.draft_ms, 4).tolist(),
            "verify_ms": np.round(self.verify_ms, 4).tolist(),
            "tiers": list(self.tiers),
        }
        atomic_write_text(path, json.dumps(content, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> SpsTable:
        """Read a table.

        Raises:
            ConfigError: the file is not an SPS table of this version.
        """
        try:
            content: Any = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"SPS table {str(path)!r} cannot be read: {error}") from error
        if isinstance(content, dict) and _KEYS_OF_SGLANG & content.keys():
            raise ConfigError(
                f"SPS table {str(path)!r} was written for SGLang's own worker; name another file, and the steps of "
                "this server are measured and written there"
            )
        if not isinstance(content, dict) or content.get("version") != FORMAT_VERSION:
            found = content.get("version") if isinstance(content, dict) else None
            raise ConfigError(
                f"SPS table {str(path)!r} has format version {found!r}, not {FORMAT_VERSION}; remove the file"
            )
        try:
            # Every key has to be there, whatever has a default.
            return msgspec.convert(
                {"tiers": None} | content, cls, dec_hook=lambda _, values: np.asarray(values, np.float64)
            )
        except msgspec.ValidationError as error:
            raise ConfigError(f"SPS table {str(path)!r} is damaged: {error}; remove the file") from error


# Its two formats have no version.
_KEYS_OF_SGLANG = {"sample_batch_tokens", "bias_seconds"}


@dataclass(frozen=True)
class LoadTimes:
    """The steps that a fixed number of requests can take.

    Attributes:
        num_tokens: [n] tokens in the verify forward, ascending; the first is the non-speculative step's.
        drafts: [n] verified drafts per request on average.
        contexts: grid of context tokens per request; its points bound the segments that times are linear on.
        start_ms: [segments, gamma + 1, n] milliseconds at the start of a segment, by depth and token count; depth 0 is
            meaningful for the non-speculative step only.
        slope_ms: [segments, gamma + 1, n] milliseconds per context token.
        padding_ms: [gamma + 1, n] milliseconds per context token that a step takes longer if it verifies the likeliest
            drafts of all requests. Without tiers, as on a CPU, attention computes as many rows for every request as for
            the one that verifies most; that one usually verifies its whole block, or all drafts that there are.
    """

    num_tokens: NDArray[np.int64]
    drafts: NDArray[np.float64]
    contexts: list[int]
    start_ms: NDArray[np.float64]
    slope_ms: NDArray[np.float64]
    padding_ms: NDArray[np.float64]

    @classmethod
    def of(cls, table: SpsTable, requests: int) -> LoadTimes:
        """Interpolate ``table`` along requests and drafts."""
        gamma = table.gamma
        if table.tiers:
            counts = [tier for tier in table.tiers if tier >= requests]
            counts += [requests * (1 + d) for d in range(gamma + 1) if requests * (1 + d) > table.tiers[-1]]
            num_tokens = np.array(counts[: bisect_left(counts, requests * (gamma + 1)) + 1], dtype=np.int64)
        else:
            num_tokens = np.arange(requests, requests * (gamma + 1) + 1, dtype=np.int64)
        drafts = np.minimum(num_tokens / requests - 1, gamma)
        draft, verify = (
            along(along(values, table.requests, np.array([float(requests)]))[0], table.drafts, at)
            for values, at in (
                (table.draft_ms, np.arange(gamma + 1, dtype=np.float64)),
                (table.verify_ms, num_tokens / requests - 1),
            )
        )
        step_ms = draft.T[:, :, None] + verify.T[:, None, :]
        slope_ms = np.diff(step_ms, axis=0) / np.diff(table.contexts)[:, None, None]
        # Before the grid the time is that of its first point: attention to a short context costs nothing. Past it the
        # last slope goes on unless it falls.
        flat = np.zeros_like(step_ms[:1])
        padding_ms = flat[0]
        if not table.tiers and len(slope_ms):
            longest = np.minimum(np.arange(gamma + 1)[:, None], num_tokens - requests)
            rows_ms = slope_ms[0, 0]
            padding_ms = np.maximum(rows_ms[requests * longest] - rows_ms, 0.0)
        return cls(
            num_tokens,
            drafts,
            contexts=list(table.contexts),
            start_ms=np.concatenate([step_ms[:1], step_ms]),
            slope_ms=np.concatenate([flat, slope_ms, np.maximum(slope_ms[-1:], 0.0) if len(slope_ms) else flat]),
            padding_ms=padding_ms,
        )

    def room_for(self, num_tokens: Any) -> Any:
        """Return the index of the smallest token count that has room for so many tokens, a number or an array."""
        return np.minimum(self.num_tokens.searchsorted(num_tokens), len(self.num_tokens) - 1)

    def column(self, drafts: float) -> int:
        """Return the index of the token count that is nearest to so many drafts per request."""
        return int(np.abs(self.drafts - drafts).argmin())

    def at(self, context: float, step: tuple[int, int] | slice = slice(None)) -> NDArray[np.float64]:
        """Return [gamma + 1, n] milliseconds at ``context`` tokens per request, or those of ``step``, an index."""
        segment = bisect_left(self.contexts, context)
        past = context - self.contexts[max(segment - 1, 0)]
        return self.start_ms[segment][step] + past * self.slope_ms[segment][step]


def along(values: NDArray[np.float64], grid: Sequence[int], at: NDArray[np.float64]) -> NDArray[np.float64]:
    """Interpolate linearly along the first axis. Beyond the grid the last slope goes on unless it falls."""
    points = np.asarray(grid, dtype=np.float64)
    if len(points) == 1:
        return np.repeat(values, len(at), axis=0)
    low = np.clip(np.searchsorted(points, at, side="right") - 1, 0, len(points) - 2)
    share = ((at - points[low]) / (points[low + 1] - points[low])).reshape(-1, *[1] * (values.ndim - 1))
    below, above = values[low], values[low + 1]
    mixed = below * (1 - share) + above * share
    return np.where(share > 1, np.maximum(mixed, above), mixed)


def geometric_grid(last: int) -> list[int]:
    """Return 1, 2, 4 ... up to and including ``last``; nothing for 0."""
    return sorted({last, *(2**power for power in range((last - 1).bit_length()))}) if last else []


# The median of three passes survives one outlier, that of five survives two.
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
        """Verify and commit ``drafts`` drafts per request; 0 is a non-speculative step."""


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
