"""Memory as bad as memory can be: what ``torch.empty`` and its like return holds NaN, or integers far off any index."""

from contextlib import contextmanager
from unittest.mock import patch

import torch

SENTINEL = -0x5A5A5A5B  # of int32 and int64
BYTE = 0x5A  # of every smaller integer, and true as a bool


def fill(tensor):
    """Poison a tensor, in place."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(torch.nan)
    return tensor.fill_(SENTINEL if tensor.dtype in (torch.int32, torch.int64) else BYTE)


@contextmanager
def poisoned_memory():
    """Inside, no allocation is clean by chance."""

    def poisoning(allocate):
        return lambda *args, **kwargs: fill(allocate(*args, **kwargs))

    with (
        patch.object(torch, "empty", poisoning(torch.empty)),
        patch.object(torch, "empty_like", poisoning(torch.empty_like)),
        patch.object(torch, "empty_strided", poisoning(torch.empty_strided)),
        patch.object(torch.Tensor, "new_empty", poisoning(torch.Tensor.new_empty)),
    ):
        yield
