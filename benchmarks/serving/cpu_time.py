"""CPU time of the processes around a measurement.

On a shared machine the wall clock also measures the neighbours. The CPU time that the server used does so much less,
and the time that the neighbours used tells which rounds were disturbed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import psutil


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
