"""The outcome of a simulated workload."""

from dataclasses import dataclass, field
from statistics import fmean, median
from typing import NamedTuple

import numpy as np

from sglang_dspark.tools.simulator.workload import Request

Lanes = list[list[tuple[int, int, int]]]
"""[requests][steps] of drafts proposed, verified and accepted."""


class Round(NamedTuple):
    """One request in one decode step: drafts proposed, verified and accepted."""

    request: int
    drafted: int
    verified: int
    accepted: int


@dataclass(frozen=True)
class Figures:
    """One line of the result, in the units of a measured sweep.

    Attributes:
        output_tok_s: tokens of all users per second.
        user_tok_s: mean over the requests of tokens per second from sending to the last token.
        ttft_ms: mean time to first token.
        tpot_ms: mean over the requests of the time per output token after the first.
        accept_length: tokens committed per request and step, bonus included.
        verify_len: drafts verified per request and step.
        wasted: share of the verified drafts that were rejected.
        parked: share of the steps in which nothing was drafted.
        step_ms: median time of a decode step.
        gap_p50_ms, gap_p99_ms, gap_max_ms: time between tokens that reach a user in a row, those of one step together.
    """

    output_tok_s: float
    user_tok_s: float
    ttft_ms: float
    tpot_ms: float
    accept_length: float
    verify_len: float
    wasted: float
    parked: float
    step_ms: float
    gap_p50_ms: float
    gap_p99_ms: float
    gap_max_ms: float


@dataclass
class Outcome:
    """The outcome of a workload.

    Attributes:
        requests: served ones, in the order of their ends.
        step_ms: of every decode step.
        plain_steps: steps in which nothing was drafted.
        rounds: all requests in all decode steps.
        loaded_ms, loaded_tokens: until the last request was sent: how long that was, and tokens of decode steps.
    """

    requests: list[Request] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    plain_steps: int = 0
    rounds: list[Round] = field(default_factory=list)
    loaded_ms: float = 0.0
    loaded_tokens: int = 0

    @property
    def loaded_tok_s(self) -> float:
        """Return tokens of all users per second while all of them had requests."""
        return 1e3 * self.loaded_tokens / self.loaded_ms

    def figures(self) -> Figures:
        """Sum up. Needs at least one request that was served."""
        wall_ms = max(r.done_ms for r in self.requests) - min(r.sent_ms for r in self.requests)
        tpots = [ms for request in self.requests if (ms := request.tpot_ms) is not None]
        gaps = [gap for request in self.requests for gap in request.gaps_ms] or [0.0]
        rounds = max(len(self.rounds), 1)
        verified, accepted = (sum(getattr(one, name) for one in self.rounds) for name in ("verified", "accepted"))
        return Figures(
            output_tok_s=1e3 * sum(request.output_tokens for request in self.requests) / wall_ms,
            user_tok_s=fmean(request.user_tok_s for request in self.requests),
            ttft_ms=fmean(request.first_ms - request.sent_ms for request in self.requests),
            tpot_ms=fmean(tpots) if tpots else 0.0,
            accept_length=1 + accepted / rounds,
            verify_len=verified / rounds,
            wasted=1 - accepted / verified if verified else 0.0,
            parked=self.plain_steps / max(len(self.step_ms), 1),
            step_ms=median(self.step_ms) if self.step_ms else 0.0,
            gap_p50_ms=median(gaps),
            gap_p99_ms=float(np.quantile(gaps, 0.99)),
            gap_max_ms=max(gaps),
        )

    def lanes(self, requests: int, steps: int) -> Lanes:
        """Return the first steps of the first requests."""
        of_request: dict[int, list[tuple[int, int, int]]] = {}
        for one in self.rounds:
            if one.request < requests:
                of_request.setdefault(one.request, []).append(one[1:])
        return [of_request[request][:steps] for request in sorted(of_request)]
