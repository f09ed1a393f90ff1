"""Keep the ranks of a tensor-parallel server together: rank 0 decides, the others follow.

Every rank holds the whole drafter and runs every stage of a step, so the collectives inside the target's forward meet
by themselves as long as all ranks do the same thing. Two sources could drive them apart: host clocks (measured step
times, and the policy that depends on them), and the last bit of a floating-point result if ranks differ in hardware,
threads or chosen kernels. One differing shape hangs the server, one differing token spoils its text silently. So a
decode step has three fixed points, at which all ranks take over rank 0's values:

1. the policy's choice: an object on the host, before anything is launched;
2. the drafted tokens, and the verify lengths or what a kernel ranks drafts by: broadcasts on the device, before the
   target reads any of it;
3. the accepted tokens: one broadcast on the device, before anything is committed.

In between, ranks compute from equal values: SGLang all-gathers the target's logits. Calibration, lagged survivals and
statistics depend on floating-point confidences and may drift on the other ranks; nothing reads them there.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from sglang.srt.distributed import GroupCoordinator

T = TypeVar("T")


class Agreement:
    """Broadcast from rank 0 of SGLang's tensor-parallel group; with one rank, do nothing."""

    def __init__(self, group: GroupCoordinator) -> None:
        self._group = group

    @property
    def needed(self) -> bool:
        """Return whether there are other ranks."""
        return bool(self._group.world_size > 1)

    @property
    def leads(self) -> bool:
        """Return whether this is rank 0."""
        return bool(self._group.rank_in_group == 0)

    def share(self, value: T) -> T:
        """Return rank 0's ``value``, any picklable object, through the host. Does not touch the device."""
        return self._group.broadcast_object(value)

    def broadcast_from_rank0(self, *tensors: torch.Tensor | None) -> None:
        """Overwrite ``tensors`` in place with rank 0's, in one broadcast per dtype on the device, without a host sync.

        Args:
            tensors: contiguous, and of the same shapes on all ranks; None is passed over.
        """
        if not self.needed:
            return
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for tensor in tensors:
            if tensor is not None and tensor.numel():
                by_dtype.setdefault(tensor.dtype, []).append(tensor.view(-1))
        for flat in by_dtype.values():
            packed = self._group.broadcast(torch.cat(flat))
            for part, agreed in zip(flat, packed.split([len(part) for part in flat]), strict=True):
                part.copy_(agreed)
