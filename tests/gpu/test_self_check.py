"""Tests of the self-check on a GPU, where kernels are compiled and graphs are captured: **not yet run on a GPU**."""

from __future__ import annotations

import pytest
import torch
from golden_server import DSPARK, TARGET

from sglang_dspark.tools.launch import CUDA_FLAGS, LaunchedServer

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

FLAGS = (*CUDA_FLAGS, "--dtype", "bfloat16", *DSPARK, "--speculative-dspark-self-check")


def test_kernels_and_graphs_agree_and_the_next_start_remembers_it(tmp_path):
    """A start that has no time left for a form leaves it to the next one."""
    found = []
    for _ in range(3):
        with LaunchedServer(TARGET, *FLAGS, env={"HF_HUB_OFFLINE": "1", "HOME": str(tmp_path)}) as server:
            found.append(server.get_json("/dspark/capabilities")["self_check"])
            assert "that are verified together differ" in server.log_path.read_text()
    assert all(one["unchecked"] == {} and one["graphs"] >= 2 for one in found)
    assert found[-1]["left_for_next_start"] == 0 and found[-1]["forms"] > 50 and found[-1]["kernels"] > 12
    assert found[-1]["seconds"] < found[0]["seconds"]
