"""Promises in simulated time: how many are kept, and what they cost the others."""

from dataclasses import dataclass, replace
from statistics import fmean

from sglang_dspark.errors import ConfigError
from sglang_dspark.tools.simulator.blocks import OwnBlocks
from sglang_dspark.tools.simulator.outcome import Outcome
from sglang_dspark.tools.simulator.sweep import Conditions

REQUESTS_PER_USER = 6


@dataclass(frozen=True)
class Promised:
    """A load under ``auto``, of which every second user is promised a time per token.

    Attributes:
        users: their number.
        tpot_ms: the promise.
        kept: share of the answers to these users that keep it.
        kept_before: share that would have kept it without being promised it.
        speed: tokens of all users per second, beside those of a server that promises nothing.
        other_tpot_ms, other_tpot_before_ms: mean time per token of the other users, and without promises.
    """

    users: int
    tpot_ms: float
    kept: float
    kept_before: float
    speed: float
    other_tpot_ms: float
    other_tpot_before_ms: float


def simulate_promises(conditions: Conditions, users: int, share: float) -> Promised:
    """Serve the same requests without promises, and with a promise of so much of the mean time per token.

    Raises:
        ConfigError: answers have a single token.
    """
    if conditions.output.high < 2:
        raise ConfigError("answers of one token have no time per token to promise; give a larger --output-tokens")
    before = _serve(conditions, users, None)
    promise = share * fmean(_tpots(before, 0) + _tpots(before, 1))
    after = _serve(conditions, users, promise)
    kept_before, kept = (fmean(ms <= promise for ms in _tpots(outcome, 1)) for outcome in (before, after))
    return Promised(
        users,
        promise,
        kept,
        kept_before,
        after.loaded_tok_s / before.loaded_tok_s,
        fmean(_tpots(after, 0)),
        fmean(_tpots(before, 0)),
    )


def _serve(conditions: Conditions, users: int, tpot_ms: float | None) -> Outcome:
    workload = replace(conditions.workload(users), num_requests=REQUESTS_PER_USER * users)
    server = conditions.server("auto")
    server.serve(replace(workload, num_requests=2 * users))
    server.blocks = OwnBlocks(conditions.blocks)
    return server.serve(replace(workload, tpot_ms=tpot_ms))


def _tpots(outcome: Outcome, place: int) -> list[float]:
    """Return the times per token of every second user, from ``place`` on."""
    return [ms for request in outcome.requests if request.user % 2 == place and (ms := request.tpot_ms) is not None]
