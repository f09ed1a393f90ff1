"""Numbers that the host decided, on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def host_index(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """int64 of the values' shape on ``device``, copied without waiting for it."""
    return _to_device(torch.tensor(values, dtype=torch.int64), device)


def host_floats(values: Sequence[float], device: torch.device) -> torch.Tensor:
    """[n] float32 on ``device``, copied without waiting for it."""
    return _to_device(torch.tensor(values, dtype=torch.float32), device)


def _to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)
