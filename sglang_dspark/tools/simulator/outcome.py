"""What a simulated workload came to."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean, median

from sglang_dspark.step.choice import Choice
from sglang_dspark.tools.simulator.workload import Request


@dataclass(frozen=True)
class Lane:
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


@dataclass
class Outcome:
    """Sums over a workload.

    Attributes:
        requests: served ones, in the order of their ends.
        lanes: the first steps in detail, as many as the server was asked to keep.
        step_ms: of every decode step.
        plain_steps: steps in which nothing was drafted.
        rounds: requests, summed over the steps.
        drafted, verified, accepted: drafts.
    """

    requests: list[Request] = field(default_factory=list)
    lanes: list[list[Lane]] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    plain_steps: int = 0
    rounds: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0

    def add_step(self, ms: float, choice: Choice) -> None:
        """A decode step ran."""
        self.step_ms.append(ms)
        self.plain_steps += choice.depth == 0

    def add_rounds(self, lanes: list[Lane], keep: bool) -> None:
        """Its result was looked at."""
        self.rounds += len(lanes)
        self.drafted += sum(lane.drafted for lane in lanes)
        self.verified += sum(lane.verified for lane in lanes)
        self.accepted += sum(lane.accepted for lane in lanes)
        if keep:
            self.lanes.append(lanes)

    def figures(self) -> Figures:
        """Sums as rates. Needs at least one request that was served."""
        wall_ms = max(r.done_ms for r in self.requests) - min(r.sent_ms for r in self.requests)
        tpots = [ms for request in self.requests if (ms := request.tpot_ms) is not None]
        rounds, verified = max(self.rounds, 1), max(self.verified, 1)
        return Figures(
            output_tok_s=1e3 * sum(request.output_tokens for request in self.requests) / wall_ms,
            user_tok_s=fmean(request.user_tok_s for request in self.requests),
            ttft_ms=fmean(request.first_ms - request.sent_ms for request in self.requests),
            tpot_ms=fmean(tpots) if tpots else 0.0,
            accept_length=1 + self.accepted / rounds,
            verify_len=self.verified / rounds,
            wasted=1 - self.accepted / verified if self.verified else 0.0,
            parked=self.plain_steps / max(len(self.step_ms), 1),
            step_ms=median(self.step_ms) if self.step_ms else 0.0,
        )
