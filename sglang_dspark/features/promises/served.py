"""Promises in a scheduler: weighs requests by how far they are behind, and counts what became of each promise."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from weakref import WeakKeyDictionary

import numpy as np
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from sglang_dspark.engine.feature import Counted, Weigher, Worker
from sglang_dspark.engine.scheduler.batch import per_token
from sglang_dspark.engine.scheduler.request_options import request_options
from sglang_dspark.engine.sglang_types import Req, ScheduleBatch
from sglang_dspark.features.promises.keys import pace_of
from sglang_dspark.fence import fenced, nothing
from sglang_dspark.scheduling.promises import Pace
from sglang_dspark.scheduling.schedule import Schedule

KEPT, LATE, UNREACHABLE = "kept", "late", "unreachable"


class Promises(Weigher):
    """Have requests that are behind their promise get more of the drafts, and those that are ahead fewer.

    Args:
        tpot_ms: that the server promises requests without a promise of their own; None for nothing.
        schedule: returns the server's, which is made after the parts.
        max_verify: drafts that a step may verify per request.
        clock: milliseconds, monotonic.
    """

    def __init__(
        self,
        tpot_ms: float | None,
        schedule: Callable[[], Schedule],
        max_verify: int,
        clock: Callable[[], float] = lambda: time.monotonic() * 1e3,
    ) -> None:
        self._tpot_ms, self._schedule, self._max_verify, self._clock = tpot_ms, schedule, max_verify, clock
        # Requests that ask for anything: steps without any cost nothing. One may end without a word.
        self._paces: WeakKeyDictionary[Req, Pace] = WeakKeyDictionary()
        self._answers = dict.fromkeys((KEPT, LATE, UNREACHABLE), 0)
        self._late_s = dict.fromkeys((LATE, UNREACHABLE), 0.0)

    @classmethod
    def of(cls, worker: Worker) -> Promises:
        """Return the part of a worker."""
        return cls(worker.options.tpot_ms, lambda: worker.schedule, worker.max_verify)

    @fenced("promises", instead=nothing)
    def prefill_done(self, batch: ScheduleBatch) -> None:
        """Note what requests ask for. An answer may begin, and end, beside the prompts of others."""
        now = self._clock()
        for req in batch.reqs:
            pace = self._paces.get(req) or pace_of(request_options(req), self._tpot_ms)
            if pace.asks:
                self._paces[req] = pace
                pace.begin(now, len(req.output_ids))

    @fenced("weights of requests", instead=nothing)
    def weights(self, batch: ScheduleBatch) -> list[float] | None:
        if not self._paces:
            return None
        now = self._clock()
        paces = ((req, self._paces.get(req)) for req in batch.reqs)
        return [1.0 if pace is None else pace.counts(now, len(req.output_ids)) for req, pace in paces]

    @fenced("promises", instead=nothing)
    def request_ended(self, req: Req) -> None:
        """Count what became of a promise, and tell the user; not if the request was aborted or has a single token."""
        pace = self._paces.pop(req, None)
        if pace is None or pace.tpot_ms is None or pace.began_ms is None:
            return
        now, tokens = self._clock(), len(req.output_ids_through_stop)
        if tokens == 1 or isinstance(req.finished_reason, FINISH_ABORT):
            return
        late_ms = pace.late_ms(now, tokens)
        outcome = KEPT
        if late_ms > 0:
            # As many tokens as its steps could have brought at most.
            most = req.spec_verify_ct * (self._max_verify + 1)
            outcome = LATE if most * pace.tpot_ms > now - pace.began_ms else UNREACHABLE
            self._late_s[outcome] += late_ms / 1e3
        self._answers[outcome] += 1
        tpot_ms = pace.tpot_ms + late_ms / (tokens - pace.first_tokens) if tokens > pace.first_tokens else 0.0
        said = {"promised_ms": pace.tpot_ms, "tpot_ms": tpot_ms, "outcome": outcome}
        per_token(req, "dspark_promise").extend([*[None] * (tokens - 1), said])

    def counted(self) -> Sequence[Counted]:
        return (
            Counted("promises", "Answers whose time per token was promised.", "outcome", self._answers),
            Counted("promises_late_seconds", "By how much answers were late.", "outcome", self._late_s),
        )

    def describe(self) -> Mapping[str, object]:
        return {"promises": {"tpot_ms": self._tpot_ms, "least_tpot_ms": self._least_ms()}}

    def _least_ms(self) -> float | None:
        """Return the time per token of a request that runs alone and all of whose drafts are kept; None if unknown."""
        times = self._schedule().times
        if times is None:
            return None
        ms = times.by_drafts(1, self._max_verify, 0.0)
        return float((ms / np.arange(1, len(ms) + 1)).min())
