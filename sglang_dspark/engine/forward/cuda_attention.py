"""SGLang's Triton attention backend with ragged verification."""

from __future__ import annotations

from typing import Any

import torch
from dspark_kernels import PagedWindows, window_attention
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc


class CudaVerifyBackend(TritonAttnBackend):
    """``triton``, plus TARGET_VERIFY over ragged rows that reads its whole layout from ``forward_batch.spec_info``.

    The stock verification kernel works one query head and one request at a time and wants index lists that are built
    for every step. Ours knows neither capped nor scaled scores, sliding windows nor heads of unequal sizes, and the
    architectures that are served have none of them (``draft.pairing``). Prefill stays SGLang's own, so a prompt is
    encoded exactly as on a server without DSPARK.
    """

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Lay out a forward; verification needs nothing."""
        if not forward_batch.forward_mode.is_target_verify():
            super().init_forward_metadata(forward_batch)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of one target layer; verification rows as laid out by ``forward_batch.spec_info``."""
        if not forward_batch.forward_mode.is_target_verify():
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, sinks)
        layout = forward_batch.spec_info
        k, v = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim), v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
        if save_kv_cache:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        attended = window_attention(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            k,
            v,
            (
                self.token_to_kv_pool.get_key_buffer(layer.layer_id),
                self.token_to_kv_pool.get_value_buffer(layer.layer_id),
            ),
            PagedWindows(
                self.req_to_token,
                forward_batch.req_pool_indices,
                forward_batch.seq_lens,
                layout.indptr,
                layout.draft_token_num,
            ),
            causal=True,
            scale=layer.scaling,
        )
        return attended.view(q.shape)
