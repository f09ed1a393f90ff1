"""SLOs in a scheduler: weighs requests by how late they are, and counts what became of each SLO."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from weakref import WeakKeyDictionary

import numpy as np
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from sglang_dspark.engine.batch import per_token
from sglang_dspark.engine.part import Counted, Weigher, Worker
from sglang_dspark.engine.request_options import asked_for
from sglang_dspark.engine.sglang_types import Req, ScheduleBatch
from sglang_dspark.features.slo.keys import TOLD, SloKeys
from sglang_dspark.fence import fenced, nothing
from sglang_dspark.scheduling.schedule import Schedule, SloState

MET, MISSED, INFEASIBLE = "met", "missed", "infeasible"


class Slos(Weigher):
    """Have requests that are late get more of the drafts, and those that are early fewer; judge each SLO.

    Args:
        tpot_ms: the server's SLO, for requests that name none; None for none.
        schedule: returns the server's, which is made after the parts.
        max_verify: drafts that a step may verify per request.
        clock: milliseconds, monotonic.
    """

    def __init__(
        self,
        tpot_ms: float | None,
        schedule: Callable[[], Schedule],
        max_verify: int,
        clock: Callable[[], float] = lambda: time.perf_counter() * 1e3,
    ) -> None:
        self._tpot_ms, self._schedule, self._max_verify, self._clock = tpot_ms, schedule, max_verify, clock
        # Requests that ask for anything: steps without any cost nothing. One may end without a word.
        self._states: WeakKeyDictionary[Req, SloState] = WeakKeyDictionary()
        self._outcomes = dict.fromkeys((MET, MISSED, INFEASIBLE), 0)

    @classmethod
    def of(cls, worker: Worker) -> Slos:
        """Return the part of a worker."""
        return cls(worker.options.tpot_ms, lambda: worker.schedule, worker.max_verify)

    @fenced("SLOs", instead=nothing)
    def prefill_done(self, batch: ScheduleBatch) -> None:
        """Note what requests ask for. An answer may begin, and end, next to the prompts of others."""
        now = self._clock()
        for req in batch.reqs:
            state = self._states.get(req) or self._asked(req)
            if state.asks:
                self._states[req] = state
                state.begin(now, len(req.output_ids))

    def _asked(self, req: Req) -> SloState:
        asked = asked_for(req, "slo", SloKeys)
        return SloState(asked.tpot_ms or self._tpot_ms, asked.weight)

    @fenced("weights of requests", instead=nothing)
    def weights(self, batch: ScheduleBatch) -> list[float] | None:
        if not self._states:
            return None
        now = self._clock()
        states = ((req, self._states.get(req)) for req in batch.reqs)
        return [1.0 if state is None else state.weight(now, len(req.output_ids)) for req, state in states]

    @fenced("SLOs", instead=nothing)
    def request_ended(self, req: Req) -> None:
        """Count what became of an SLO, and tell the user; not if the request was aborted, or has a single token."""
        state, tokens = self._states.pop(req, None), len(req.output_ids_through_stop)
        if state is None or state.tpot_ms is None or state.began_ms is None:
            return
        if isinstance(req.finished_reason, FINISH_ABORT) or tokens < 2:
            return
        now = self._clock()
        late_ms = state.late_ms(now, tokens)
        # As many tokens as its steps could have brought at most.
        most = req.spec_verify_ct * (self._max_verify + 1)
        feasible = most * state.tpot_ms > now - state.began_ms
        outcome = MET if late_ms <= 0 else MISSED if feasible else INFEASIBLE
        self._outcomes[outcome] += 1
        tpot_ms = state.tpot_ms + late_ms / (tokens - state.first_tokens) if tokens > state.first_tokens else 0.0
        found = {"slo_tpot_ms": state.tpot_ms, "tpot_ms": tpot_ms, "outcome": outcome}
        per_token(req, TOLD).extend([*[None] * (tokens - 1), found])

    def counted(self) -> Sequence[Counted]:
        return (Counted("slos", self._outcomes, "outcome", "Answers with an SLO of time per token."),)

    def describe(self) -> Mapping[str, object]:
        """Return the server's SLO, and the least time per token of a request that runs alone with all drafts kept.

        The least is None if step times are unknown.
        """
        times, least_tpot_ms = self._schedule().times, None
        if times is not None:
            ms = times.by_drafts(1, self._max_verify, 0.0)
            least_tpot_ms = float((ms / np.arange(1, len(ms) + 1)).min())
        return {"slo": {"tpot_ms": self._tpot_ms, "least_tpot_ms": least_tpot_ms}}
