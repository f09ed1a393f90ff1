"""Weights do not come while there is no memory for them."""

from types import SimpleNamespace

import pytest
from sglang.srt.managers import io_struct

from sglang_dspark.features.weights.handlers import write


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("UpdateWeightFromDiskReq", {"model_path": "m"}),
        ("UpdateWeightFromDiskReq", {"model_path": "m", "load_format": "draft"}),
        ("UpdateWeightsFromTensorReq", {"serialized_named_tensors": []}),
        ("BeginWeightUpdateReq", {}),
    ],
)
def test_nothing_is_written_into_memory_that_is_released(kind, given):
    manager = SimpleNamespace(offload_tags={"weights"})
    answer = write(lambda *_: pytest.fail("written"), manager, getattr(io_struct, f"{kind}Input")(**given))
    assert isinstance(answer, getattr(io_struct, f"{kind}Output"))
    assert not answer.success and "POST /resume_memory_occupation" in answer.message
