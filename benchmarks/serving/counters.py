"""What the servers of a sweep count themselves."""

from __future__ import annotations

from serving.configurations import OF_SGLANG, Configuration
from sglang_dspark.tools.launch import LaunchedServer

STAT_KEYS = {
    "drafted": "drafted_tokens",
    "verified": "verified_tokens",
    "accepted": "accepted_tokens",
    "committed": "committed_tokens",
    "decode_rounds": "rounds",
    "steps": "steps",
    "plain_steps": "plain_steps",
    "parked_steps": "parked_steps",
}
"""Column -> counter of ``GET /dspark/stats``."""


def read_counters(server: LaunchedServer, configuration: Configuration) -> dict[str, int] | None:
    """Return the counters since the start of the server by column; None for a server without DSPARK."""
    if not configuration.is_dspark:
        return None
    report = server.get_json("/dspark/stats")
    return {column: report[key] for column, key in STAT_KEYS.items()}


def read_accept_length(server: LaunchedServer, configuration: Configuration) -> float | None:
    """Return the accept length since the cache was flushed, as SGLang reports it; None if the server does not.

    SGLang counts in units of its decode log interval (40 steps), so the last few steps of a round are missing.
    """
    if configuration.policy not in OF_SGLANG:
        return None
    states = server.get_json("/server_info").get("internal_states") or [{}]
    length = states[0].get("avg_spec_accept_length")
    return None if length is None else float(length)
