"""Kernels run wherever the tests do, in memory that holds NaN before anything is written; one thread, no gradients."""

import pytest
import torch
from dspark_kernels import kernels_anywhere
from kernel_cases import poisoned_memory


@pytest.fixture(autouse=True)
def inference():
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield


@pytest.fixture(autouse=True)
def kernels():
    """Compiled on a GPU, otherwise under Triton's interpreter; references are called by their own names."""
    with kernels_anywhere():
        yield


@pytest.fixture(autouse=True)
def poison():
    """Poison memory that is allocated, so that reading it unwritten fails."""
    with poisoned_memory():
        yield


@pytest.fixture
def device() -> torch.device:
    """Return where Triton kernels run."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
