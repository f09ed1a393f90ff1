"""SLOs: a request may name a time per token and a weight, and gets more of the drafts when it is late.

Requests are weighed by how late they are, and each answer says what became of its SLO.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from math import inf
from typing import Annotated, Any, Self
from weakref import WeakKeyDictionary

import numpy as np
from msgspec import Meta
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.plugins.hook_registry import HookType

from sglang_dspark.config import flag_name
from sglang_dspark.engine.batch import per_token
from sglang_dspark.engine.feature import Feature, RequestKeys
from sglang_dspark.engine.hooks import Moment, hook
from sglang_dspark.engine.part import Counted, Weigher, Worker
from sglang_dspark.engine.request_options import asked_for
from sglang_dspark.engine.server import DSparkServer, OtherServer, speculating
from sglang_dspark.engine.sglang_types import Req, ScheduleBatch, TokenizerManager
from sglang_dspark.errors import best_effort, nothing
from sglang_dspark.scheduling.schedule import SloState

TOLD = "dspark_slo"
"""Of SGLang's ``customized_info``, and of ``meta_info``: what became of the SLO."""


class SloKeys(RequestKeys, frozen=True, omit_defaults=True):
    """Say how fast a request wants to be.

    Attributes:
        tpot_ms: milliseconds per token after the first one, over the whole answer; None takes the server's.
        weight: what its drafts count next to those of others.
    """

    tpot_ms: Annotated[float, Meta(ge=0.1, le=10_000, description="must be a number from 0.1 to 10000")] | None = None
    weight: Annotated[float, Meta(ge=0.01, le=1, description="must be a number from 0.01 to 1")] = 1.0

    @classmethod
    def unserved(cls, server: DSparkServer | OtherServer) -> Collection[str]:
        return () if isinstance(server, DSparkServer) else tuple(cls.key_types())

    def for_scheduler(self, given: Collection[str], manager: TokenizerManager) -> Self:
        server = speculating(manager.server_args)
        assert server is not None, "requests of other servers are not checked"
        for key in (key for key in self.unserved(server) if key in given):
            raise ValueError(
                f"speculation.{key}={getattr(self, key):g} is not served by SGLang's own worker; drop the key, or "
                "start the server with --speculative-dspark-engine plugin if that serves the target"
            )
        least_ms = server.config.min_tpot_ms
        if self.tpot_ms is not None and self.tpot_ms < least_ms:
            remedy = "drop the key" if least_ms == inf else "name that or more, or drop the key"
            raise ValueError(
                f"speculation.tpot_ms={self.tpot_ms:g} is less than requests may name on this server, "
                f"{flag_name('min_tpot_ms')}={least_ms:g}; {remedy}"
            )
        return self


@hook(
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.update_request_meta_info",
    HookType.AFTER,
    where="front_end",
    reason="SGLang has a place for what a scheduler says of each token, and none for what it says of an answer",
    by=Moment.SOME_TIME,
)
@best_effort("messages about SLOs", instead=nothing)
def tell_once(result: None, manager: TokenizerManager, meta_info: dict[str, Any], state: Any, *args: object) -> None:
    """Leave only what became of an SLO in ``meta_info``, without a null for every token before it."""
    if entries := state.customized_info_accumulated.pop(TOLD, None):
        del meta_info[TOLD]
        if entries[-1] is not None:
            meta_info[TOLD] = entries[-1]


MET, MISSED, INFEASIBLE = "met", "missed", "infeasible"


class Slos(Weigher):
    """Have requests that are late get more of the drafts, and those that are early fewer; judge each SLO.

    Args:
        worker: ours, whose options have the SLO of requests that name none.
        clock: milliseconds, monotonic.
    """

    def __init__(self, worker: Worker, clock: Callable[[], float] = lambda: time.perf_counter() * 1e3) -> None:
        self._worker, self._tpot_ms, self._clock = worker, worker.options.tpot_ms, clock
        # Requests that ask for anything: steps without any cost nothing. One may end without a word.
        self._states: WeakKeyDictionary[Req, SloState] = WeakKeyDictionary()
        self._outcomes = dict.fromkeys((MET, MISSED, INFEASIBLE), 0)

    @best_effort("SLOs", instead=nothing)
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

    @best_effort("weights of requests", instead=nothing)
    def weights(self, batch: ScheduleBatch) -> list[float] | None:
        if not self._states:
            return None
        now = self._clock()
        states = ((req, self._states.get(req)) for req in batch.reqs)
        return [1.0 if state is None else state.weight(now, len(req.output_ids)) for req, state in states]

    @best_effort("SLOs", instead=nothing)
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
        most = req.spec_verify_ct * (self._worker.max_verify + 1)
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
        times, least_tpot_ms = self._worker.schedule.times, None
        if times is not None:
            ms = times.by_drafts(1, self._worker.max_verify, 0.0)
            least_tpot_ms = float((ms / np.arange(1, len(ms) + 1)).min())
        return {"slo": {"tpot_ms": self._tpot_ms, "least_tpot_ms": least_tpot_ms}}


FEATURE = Feature(
    __name__,
    is_used=lambda args: True,
    request_keys=SloKeys,
    part=Slos,
)
