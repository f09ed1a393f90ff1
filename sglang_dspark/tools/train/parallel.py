"""Several processes that train one drafter together, started by ``torchrun``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# The others wait while the first process lets the target write its texts. One that fails ends them all by torchrun.
_PATIENCE = timedelta(days=30)
# On a GPU they only meet in the middle of a step: one that is so late hangs.
_PATIENCE_OF_GPUS = timedelta(minutes=30)


@dataclass(frozen=True)
class Processes:
    """One of ``count`` processes; alone by default, and then nothing here does anything."""

    rank: int = 0
    count: int = 1
    meeting: Any = None  # the group of torch.distributed in which CPUs wait for each other

    @property
    def is_first(self) -> bool:
        """Whether this is the one that writes files and speaks."""
        return self.rank == 0

    def wait(self) -> None:
        """Until all processes are here. A GPU does not spin meanwhile: tensors of the CPU travel by gloo."""
        if self.count > 1:
            dist.all_reduce(torch.zeros(1), group=self.meeting)

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by its sum over the processes, which is the same to the bit in all of them."""
        if self.count > 1:
            for tensor in tensors:
                dist.all_reduce(tensor)

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Give every process the tensors of the first one."""
        if self.count > 1:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)

    def agreed(self, number: float) -> float:
        """The number of the first process, on which the CPU of the others waits; clocks differ."""
        if self.count == 1:
            return number
        told = torch.tensor(number, dtype=torch.float64)
        dist.broadcast(told, src=0, group=self.meeting)
        return float(told)

    def agree_on(self, number: float) -> bool:
        """Whether all processes have this number; all get the same answer."""
        differing = torch.tensor(float(number != self.agreed(number)))
        if self.count > 1:
            dist.all_reduce(differing, group=self.meeting)
        return not differing


@contextmanager
def joined_processes(device: str) -> Iterator[Processes]:
    """What ``torchrun`` has started this process as one of; without it, a process alone.

    Args:
        device: that the process works on, ``cpu`` or ``cuda:N``.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    cuda = device.startswith("cuda")
    if torch.device(device).index is not None and cuda:
        torch.cuda.set_device(device)  # Triton launches on the current device, wherever the tensors are
    if count == 1:
        yield Processes()
        return
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=_PATIENCE_OF_GPUS)
    yield Processes(dist.get_rank(), count, dist.new_group(backend="gloo", timeout=_PATIENCE))
    # After an error the others are not here: this process would wait for them, and torchrun for its end.
    dist.destroy_process_group()


def local_device(device: str) -> str:
    """The GPU of this process, where only ``cuda`` was asked for: one per process of a machine."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if device == "cuda" and "LOCAL_RANK" in os.environ else device
