"""Count around a measurement: the servers' own counters, and the CPU time of their processes.

On a shared machine the wall clock also measures the neighbours. The CPU time that the server used does so much less,
and the time that the neighbours used tells which rounds were disturbed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import psutil

from serving.configurations import Configuration
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
BESIDE = "prompts_beside"
"""Column of the prompts that were verified next to drafts."""


def read_counters(server: LaunchedServer, configuration: Configuration) -> dict[str, int] | None:
    """Return the counters since the start of the server by column; None for a server without DSPARK."""
    if not configuration.is_dspark:
        return None
    report = server.get_json("/dspark/stats")
    counts = {column: report[key] for column, key in STAT_KEYS.items()}
    return counts | {BESIDE: report.get("prompts", {}).get("beside", 0)}


def read_accept_length(server: LaunchedServer, configuration: Configuration) -> float | None:
    """Return the accept length since the cache was flushed, as SGLang reports that of its own algorithms; else None.

    SGLang counts in units of its decode log interval (40 steps), so the last few steps of a round are missing.
    """
    if configuration.is_dspark:
        return None
    states = server.get_json("/server_info").get("internal_states") or [{}]
    length = states[0].get("avg_spec_accept_length")
    return None if length is None else float(length)


@dataclass(frozen=True)
class CpuTime:
    """CPU seconds used so far; differences of two readings are what is of interest.

    Attributes:
        server_s: by the server's process and its descendants.
        others_s: by every process that is neither the server nor this one, summed over the cores.
    """

    server_s: float
    others_s: float

    @classmethod
    def read(cls, server_pid: int) -> Self:
        """Take a reading.

        Args:
            server_pid: the server's process.
        """
        machine = psutil.cpu_times()
        busy_s = sum(getattr(machine, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal"))
        server = psutil.Process(server_pid)
        server_s = sum(_used_s(process) for process in (server, *server.children(recursive=True)))
        return cls(server_s, busy_s - server_s - _used_s(psutil.Process()))

    def __sub__(self, earlier: CpuTime) -> CpuTime:
        return CpuTime(self.server_s - earlier.server_s, self.others_s - earlier.others_s)


def _used_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)
