"""The synthetic pair and the test of the text's law serve here too; references run as they do in a server."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))


@pytest.fixture(autouse=True)
def inference():
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
