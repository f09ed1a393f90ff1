"""Properties of the GPU that launches need; on other devices, values that suit Triton's interpreter."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

_INTERPRETED_PROCESSORS = 2  # enough to see work shared out unevenly
_INTERPRETED_SHARED_BYTES = 232_448  # as an H100 has


@cache
def num_processors(device: torch.device) -> int:
    """Return the number of multiprocessors of the GPU."""
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def shared_bytes(device: torch.device) -> int:
    """Return the shared memory of a program in bytes: 99 KB on an L4 or an RTX 4090, over twice that on an H100."""
    if device.type != "cuda":
        return _INTERPRETED_SHARED_BYTES
    properties: Any = torch.cuda.get_device_properties(device)  # the stub lacks the attribute
    return int(properties.shared_memory_per_block_optin)
