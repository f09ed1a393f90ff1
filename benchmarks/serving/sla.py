"""Goodput: what a server delivers within an SLO on its latencies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from serving.client import Reply


@dataclass(frozen=True)
class Sla:
    """The SLO of every single request. None: that latency has no limit.

    Attributes:
        ttft_ms: longest time to the first token.
        tpot_ms: longest mean time per output token after the first.
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def is_met(self, reply: Reply) -> bool:
        """Return whether a request met the SLO; the limits themselves still count as met."""
        if self.ttft_ms is not None and 1e3 * reply.ttft_s > self.ttft_ms:
            return False
        return self.tpot_ms is None or reply.tpot_s is None or 1e3 * reply.tpot_s <= self.tpot_ms


def goodput(replies: Sequence[Reply], wall_s: float, sla: Sla) -> dict[str, float | None]:
    """Return the columns of goodput of a round that took ``wall_s`` seconds; all None without an SLO."""
    if sla == Sla():
        return dict.fromkeys(("sla_met_share", "goodput_req_s", "goodput_tok_s"))
    met = [reply for reply in replies if sla.is_met(reply)]
    return {
        "sla_met_share": len(met) / len(replies),
        "goodput_req_s": len(met) / wall_s,
        "goodput_tok_s": sum(reply.num_tokens for reply in met) / wall_s,
    }
