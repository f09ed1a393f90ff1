"""References run as they do in a server."""

import pytest
import torch


@pytest.fixture(autouse=True)
def inference():
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
