"""SLOs in simulated time: how many are met, and what they cost the others."""

from dataclasses import dataclass, replace
from statistics import fmean

from sglang_dspark.errors import ConfigError
from sglang_dspark.tools.simulator.server import Outcome
from sglang_dspark.tools.simulator.sweep import Conditions
from sglang_dspark.tools.simulator.workload import OwnBlocks

REQUESTS_PER_USER = 6


@dataclass(frozen=True)
class SloPoint:
    """A load under ``auto``, of which every second user has an SLO of time per token.

    Attributes:
        users: their number.
        tpot_ms: the SLO.
        met: share of the answers to these users that meet it.
        met_before: share that is as fast where no user has an SLO.
        speed: tokens of all users per second, over those where no user has an SLO.
        other_tpot_ms, other_tpot_before_ms: mean time per token of the other users, and where no user has an SLO.
    """

    users: int
    tpot_ms: float
    met: float
    met_before: float
    speed: float
    other_tpot_ms: float
    other_tpot_before_ms: float


def simulate_slo(conditions: Conditions, users: int, share: float) -> SloPoint:
    """Serve the same requests without SLOs, and with one of so much of the mean time per token.

    Raises:
        ConfigError: one half of the users has no time per token.
    """
    before = _serve(conditions, users, None)
    others_before, ours_before = _tpots(before, users)
    if not others_before or not ours_before:
        raise ConfigError(
            "--slo is about every second user, and tokens after the first; give two --users or more, as many "
            "--requests, and longer --output-tokens"
        )
    slo_ms = share * fmean(others_before + ours_before)
    after = _serve(conditions, users, slo_ms)
    others, ours = _tpots(after, users)
    met_before, met = (fmean(ms <= slo_ms for ms in times) for times in (ours_before, ours))
    speed = after.loaded_tok_s / before.loaded_tok_s
    return SloPoint(users, slo_ms, met, met_before, speed, fmean(others), fmean(others_before))


def _serve(conditions: Conditions, users: int, tpot_ms: float | None) -> Outcome:
    count = conditions.num_requests or REQUESTS_PER_USER * users
    workload = replace(conditions.workload(users), num_requests=count)
    server = conditions.server("auto")
    server.serve(replace(workload, num_requests=-(-count // 3)))
    server.blocks = OwnBlocks(conditions.blocks)
    return server.serve(replace(workload, tpot_ms=tpot_ms))


def _tpots(outcome: Outcome, users: int) -> tuple[list[float], list[float]]:
    """Return the times per token of the users without an SLO, and of those with one."""
    times: tuple[list[float], list[float]] = [], []
    for request in outcome.requests:
        if request.user < users and (ms := request.tpot_ms) is not None:
            times[request.user % 2].append(ms)
    return times
