"""NaN of the target: SGLang's switches do what they do on a plain server."""

import pytest
import torch
from sglang.srt.environ import envs

from sglang_dspark.engine.logits_processing import SWITCHES, NanCheck


def logits():
    return torch.tensor([[0.5, float("nan"), -float("inf")], [1.0, 2.0, 3.0]])


def test_nothing_is_looked_at_by_default():
    assert NanCheck.of(None) is None


def test_nan_is_replaced_where_sglang_is_asked_to():
    """It is replaced in first tokens, and in the rows of every step."""
    with envs.SGLANG_SANITIZE_NAN_LOGITS.override(True):
        check = NanCheck.of(None)
        for look in (check.first_logits, check.step_comes(None).after_verify):
            look(None, seen := logits())
            assert seen[0].tolist() == pytest.approx([0.5, -1e30, -1e30])
            assert torch.equal(seen[1], logits()[1])


@pytest.mark.parametrize("switch", SWITCHES[1:], ids=lambda switch: switch.name)
def test_nan_ends_the_server_where_sglang_is_asked_to(switch):
    with switch.override(True), pytest.raises(RuntimeError, match=r"Expected Tensor|NaN"):
        NanCheck.of(None).first_logits(None, logits())
