"""NaN among a target's logits, as SGLang's sampler treats it on a plain server."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from sglang.srt.environ import envs
from sglang.srt.utils.async_probe import sanitize_nan_logits

SWITCHES = (envs.SGLANG_SANITIZE_NAN_LOGITS, envs.SGLANG_ENABLE_ASYNC_ASSERT, envs.SGLANG_ENABLE_NAN_LOGITS_CHECK)


def nan_check() -> Callable[[torch.Tensor], None] | None:
    """What is done to logits [n, V], in place, before anybody judges them; None where none of the switches is set."""
    if any(switch.get() for switch in SWITCHES):
        return partial(sanitize_nan_logits, msg="DSPARK: target logits")
    return None
