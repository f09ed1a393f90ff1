"""Treat NaN in logits as SGLang's sampler does."""

from collections.abc import Callable
from functools import partial

import torch
from sglang.srt.environ import envs
from sglang.srt.utils.async_probe import sanitize_nan_logits

NAN_SWITCHES = (
    envs.SGLANG_SANITIZE_NAN_LOGITS,
    envs.SGLANG_ENABLE_ASYNC_ASSERT,
    envs.SGLANG_ENABLE_NAN_LOGITS_CHECK,
)
"""Switches of SGLang by which its sampler looks for NaN."""


def nan_check() -> Callable[[torch.Tensor], None] | None:
    """Return SGLang's treatment of NaN in logits [n, V], in place, before any other; None if no switch asks for it."""
    if any(switch.get() for switch in NAN_SWITCHES):
        return partial(sanitize_nan_logits, msg="DSPARK: target logits")
    return None
