"""One thread, no gradients: how the references run in a server."""

import pytest
import torch


@pytest.fixture(autouse=True)
def inference():
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield


@pytest.fixture
def device() -> torch.device:
    """Where Triton kernels run: compiled on a GPU, otherwise interpreted on the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
