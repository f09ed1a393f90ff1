"""SGLang's relay of per-request values between overlapped steps, made fit for the CPU."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.managers.overlap_utils import FutureMap


class CpuFutureMap(FutureMap):
    """``FutureMap`` for CPU tensors, which know no streams."""

    def _resolve_spec_extras(self, batch: Any) -> None:
        # The base class calls Tensor.record_stream, which raises for CPU tensors. Of the relayed values DSPARK uses
        # only the bonus token, so there is nothing else to resolve.
        draft_input = batch.spec_info
        if draft_input is not None and draft_input.future_indices.shape[0] > 0:
            draft_input.bonus_tokens = self.output_tokens_buf[draft_input.future_indices]


def create_future_map(device: Any, *args: Any, **wishes: Any) -> FutureMap:
    """The relay for ``device``, with SGLang's further arguments for one."""
    cls = CpuFutureMap if torch.device(device).type == "cpu" else FutureMap
    return cls(device, *args, **wishes)
