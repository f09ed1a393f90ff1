"""Goodput: what a server delivers within a promise about its latencies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from serving.client import Reply


@dataclass(frozen=True)
class Sla:
    """A promise to every single request. None: nothing is promised about that latency.

    Attributes:
        ttft_ms: longest time to the first token.
        tpot_ms: longest mean time per output token after the first.
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    @property
    def is_given(self) -> bool:
        """Return whether anything is promised."""
        return self.ttft_ms is not None or self.tpot_ms is not None

    def is_met(self, reply: Reply) -> bool:
        """Return whether a request was served as promised; the limits themselves still count as kept."""
        if self.ttft_ms is not None and 1e3 * reply.ttft_s > self.ttft_ms:
            return False
        return self.tpot_ms is None or reply.tpot_s is None or 1e3 * reply.tpot_s <= self.tpot_ms


@dataclass(frozen=True)
class Goodput:
    """What was served as promised in a round; all None without a promise.

    Attributes:
        met_share: share of the requests, 0 to 1.
        req_s, tok_s: those requests, and their output tokens, per second of the round.
    """

    met_share: float | None
    req_s: float | None
    tok_s: float | None


def goodput(replies: Sequence[Reply], wall_s: float, sla: Sla) -> Goodput:
    """Goodput of a round that took ``wall_s`` seconds."""
    if not sla.is_given:
        return Goodput(None, None, None)
    met = [reply for reply in replies if sla.is_met(reply)]
    return Goodput(len(met) / len(replies), len(met) / wall_s, sum(reply.num_tokens for reply in met) / wall_s)
