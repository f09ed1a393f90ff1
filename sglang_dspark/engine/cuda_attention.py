"""SGLang's Triton attention backend with ragged verification."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend


class CudaVerifyBackend(TritonAttnBackend):
    """``triton``, with as many query rows per request as the plan says.

    The extend kernel behind verification reads the rows of each request from ``qo_indptr``; the stock backend fills it
    for one number of rows. Prefill, and verification inside the stock CUDA graphs, stay SGLang's own.
    """

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Lay out a forward that runs outside of CUDA graphs."""
        super().init_forward_metadata(forward_batch)
        if forward_batch.forward_mode.is_target_verify():
            layout = forward_batch.spec_info
            self.forward_metadata.qo_indptr = layout.indptr.to(torch.int32)
            self.forward_metadata.max_extend_len = layout.draft_token_num
