"""NaN of the target: SGLang's switches do what they do on a plain server."""

import pytest
import torch
from sglang.srt.environ import envs

from sglang_dspark.engine.scheduler.worker_base import SpecWorkerBase


def logits():
    return torch.tensor([[0.5, float("nan"), -float("inf")], [1.0, 2.0, 3.0]])


def test_nothing_is_looked_at_by_default():
    seen = logits()
    SpecWorkerBase.check_logits(seen)
    assert torch.equal(seen.isnan(), logits().isnan())


def test_nan_is_replaced_where_sglang_is_asked_to():
    seen = logits()
    with envs.SGLANG_SANITIZE_NAN_LOGITS.override(True):
        SpecWorkerBase.check_logits(seen)
    assert seen[0].tolist() == pytest.approx([0.5, -1e30, -1e30])
    assert torch.equal(seen[1], logits()[1])


def test_nan_ends_the_server_where_sglang_is_asked_to():
    with envs.SGLANG_ENABLE_ASYNC_ASSERT.override(True), pytest.raises(RuntimeError, match=r"Expected Tensor|NaN"):
        SpecWorkerBase.check_logits(logits())
