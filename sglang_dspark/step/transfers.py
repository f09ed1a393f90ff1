"""Copies between host and device without a wait."""

from collections.abc import Sequence

import torch
from dspark_kernels import to_device


def host_index(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """Return int64 of the values' shape on ``device``."""
    return to_device(torch.tensor(values, dtype=torch.int64), device)


def host_floats(values: Sequence[float], device: torch.device) -> torch.Tensor:
    """Return [n] float32 on ``device``."""
    return to_device(torch.tensor(values, dtype=torch.float32), device)


def copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy without waiting; the source stays allocated until the current stream has read it."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return host
