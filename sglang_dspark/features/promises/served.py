"""Promises in a scheduler: weighs requests by how far they are behind, and counts what became of each promise."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from math import inf
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from sglang_dspark.engine.agreement import Agreement
from sglang_dspark.engine.batch import per_token
from sglang_dspark.engine.part import Counted, Weigher, Worker
from sglang_dspark.engine.sglang_types import Req, ScheduleBatch
from sglang_dspark.features.promises.keys import PromiseKeys, promised
from sglang_dspark.fence import fenced, nothing
from sglang_dspark.scheduling.first_tokens import PATIENCE_MS
from sglang_dspark.scheduling.promises import Pace
from sglang_dspark.scheduling.schedule import Schedule

OUTCOMES = KEPT, LATE, UNREACHABLE = "kept", "late", "unreachable"
TPOT, TTFT = "tpot", "ttft"


class Promises(Weigher):
    """Have requests that are behind their promise get more of the drafts, and those that are ahead fewer; judge each.

    Args:
        server: what the server promises requests without a promise of their own.
        schedule: returns the server's, which is made after the parts.
        max_verify: drafts that a step may verify per request.
        agreement: of the ranks.
        clock: milliseconds, of the clock by which SGLang notes the times of requests.

    Attributes:
        had_room: requests that room was made for beside a prompt that has begun. One that did not start then has found
            something else missing. It would again, and that prompt would hardly go on.
    """

    def __init__(
        self,
        server: PromiseKeys,
        schedule: Callable[[], Schedule],
        max_verify: int,
        agreement: Agreement,
        clock: Callable[[], float] = lambda: time.perf_counter() * 1e3,
    ) -> None:
        self._server, self._schedule, self._max_verify, self._clock = server, schedule, max_verify, clock
        self.agreement, self.had_room = agreement, WeakSet[Req]()
        # Requests that ask for anything: steps without any cost nothing. One may end without a word.
        self._paces: WeakKeyDictionary[Req, Pace] = WeakKeyDictionary()
        self._answers = {f"{kind}_{outcome}": 0 for kind in (TPOT, TTFT) for outcome in OUTCOMES}
        self._late_s = {f"{kind}_{outcome}": 0.0 for kind in (TPOT, TTFT) for outcome in (LATE, UNREACHABLE)}

    @classmethod
    def of(cls, worker: Worker) -> Promises:
        """Return the part of a worker."""
        server = PromiseKeys(tpot_ms=worker.options.tpot_ms, ttft_ms=worker.options.ttft_ms)
        return cls(server, lambda: worker.schedule, worker.max_verify, worker.agreement)

    def promised_ms(self, req: Req) -> float | None:
        """Return the promised time to the first token of a request that waits; None if it has none, or has come."""
        return None if req.output_ids else promised(req, self._server).ttft_ms

    def out_of_turn(self, queue: Sequence[Req]) -> list[int]:
        """Return the places in SGLang's queue of requests that may not keep its order.

        They have options of their own or were retracted, unless the server promises first tokens to all. There are none
        if no request is promised one.
        """
        every = self._server.ttft_ms is not None
        if not every and not any(req.sampling_params.custom_params and self.promised_ms(req) for req in queue):
            return []
        return [
            place for place, req in enumerate(queue) if every or req.is_retracted or req.sampling_params.custom_params
        ]

    def start_by_ms(self, req: Req) -> float:
        """Return when a prompt has to start, or go on, at the latest.

        A request that has begun to answer and was retracted goes first: its user waits for the next token.
        """
        if req.output_ids:
            return -inf
        promised_ms, times = self.promised_ms(req), self._schedule().times
        if promised_ms is None:
            return patient_until_ms(req)
        prefill_ms = 0.0 if times is None else rows_of(req) * times.row_ms
        return req.time_stats.scheduler_recv_time * 1e3 + promised_ms - prefill_ms

    @fenced("promises", instead=nothing)
    def prefill_done(self, batch: ScheduleBatch) -> None:
        """Note what requests ask for. An answer may begin, and end, beside the prompts of others."""
        now = self._clock()
        self.had_room.difference_update(batch.reqs)
        for req in batch.reqs:
            asked = promised(req, self._server)
            pace = self._paces.get(req) or Pace(asked.tpot_ms, asked.weight)
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
        """Count what became of a promise, and tell the user; not if the request was aborted, or asked for no token."""
        pace, tokens = self._paces.pop(req, None), len(req.output_ids_through_stop)
        if isinstance(req.finished_reason, FINISH_ABORT) or not tokens:
            return
        said = self._first_token(req) | ({} if pace is None or tokens == 1 else self._pace(req, pace, tokens))
        if said:
            per_token(req, "dspark_promise").extend([*[None] * (tokens - 1), said])

    def _pace(self, req: Req, pace: Pace, tokens: int) -> dict[str, object]:
        """Count an answer of more than one token; return what became of its promised time per token, as JSON."""
        if pace.tpot_ms is None or pace.began_ms is None:
            return {}
        now = self._clock()
        late_ms = pace.late_ms(now, tokens)
        # As many tokens as its steps could have brought at most.
        most = req.spec_verify_ct * (self._max_verify + 1)
        outcome = self._count(TPOT, late_ms, reachable=most * pace.tpot_ms > now - pace.began_ms)
        tpot_ms = pace.tpot_ms + late_ms / (tokens - pace.first_tokens) if tokens > pace.first_tokens else 0.0
        return {"promised_ms": pace.tpot_ms, "tpot_ms": tpot_ms, "outcome": outcome}

    def _first_token(self, req: Req) -> dict[str, object]:
        """Count a first token; return what became of its promise, as JSON."""
        promised_ms, times = promised(req, self._server).ttft_ms, req.time_stats
        if promised_ms is None or not times.prefill_finished_time:
            return {}
        ttft_ms, prefill_ms = (
            (times.prefill_finished_time - begin) * 1e3
            for begin in (times.scheduler_recv_time, times.forward_entry_time)
        )
        outcome = self._count(TTFT, ttft_ms - promised_ms, reachable=prefill_ms <= promised_ms)
        return {"promised_ttft_ms": promised_ms, "ttft_ms": ttft_ms, "ttft_outcome": outcome}

    def _count(self, kind: str, late_ms: float, *, reachable: bool) -> str:
        """Count a promise, and return what became of it."""
        outcome = KEPT if late_ms <= 0 else LATE if reachable else UNREACHABLE
        self._answers[f"{kind}_{outcome}"] += 1
        if outcome != KEPT:
            self._late_s[f"{kind}_{outcome}"] += late_ms / 1e3
        return outcome

    def counted(self) -> Sequence[Counted]:
        return (
            Counted("promises", "Promised times per token and to the first token.", "kind_outcome", self._answers),
            Counted("promises_late_seconds", "By how much these were missed.", "kind_outcome", self._late_s),
        )

    def describe(self) -> Mapping[str, object]:
        """Return the server's promises, and the least times of a request that runs alone, None if they are unknown.

        They are per token with all drafts kept, and to a first token.
        """
        times, least_tpot_ms, least_ttft_ms = self._schedule().times, None, None
        if times is not None:
            ms = times.by_drafts(1, self._max_verify, 0.0)
            least_tpot_ms = float((ms / np.arange(1, len(ms) + 1)).min())
            least_ttft_ms = times.single_ms(1, 0, 0, 0.0)
        least = {"least_tpot_ms": least_tpot_ms, "least_ttft_ms": least_ttft_ms}
        return {"promises": {"tpot_ms": self._server.tpot_ms, "ttft_ms": self._server.ttft_ms} | least}


def patient_until_ms(req: Req) -> float:
    """Return how long a request without a promise lets others go first, from when it was put into the queue."""
    return req.time_stats.wait_queue_entry_time * 1e3 + PATIENCE_MS


def rows_of(req: Req) -> int:
    """Return the rows of its text that the device's prefix cache lacks, as far as SGLang has looked."""
    # To order its queue SGLang matches more than it may use. A prompt that has begun has got to an end.
    known = req.extend_end or min(req.prefix_len, req.num_matched_prefix_tokens)
    return max(1, len(req.origin_input_ids) + len(req.output_ids) - known)
