"""Indices that the host decided, on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def host_index(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """[n] int64 on ``device``, copied without waiting for it."""
    index = torch.tensor(values, dtype=torch.int64)
    if device.type == "cuda":
        index = index.pin_memory()
    return index.to(device, non_blocking=True)
