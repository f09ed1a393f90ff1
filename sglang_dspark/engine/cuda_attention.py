"""SGLang's Triton attention backend with ragged verification."""

from __future__ import annotations

from typing import Any

import torch
from dspark_kernels.window_attention import num_splits, window_attention
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc


class CudaVerifyBackend(TritonAttnBackend):
    """``triton``, plus TARGET_VERIFY over ragged rows that reads its whole layout from ``forward_batch.spec_info``.

    The stock verification kernel works one query head and one request at a time and wants index lists that are built
    for every step. Prefill stays SGLang's own, so a prompt is encoded exactly as on a server without DSPARK.

    Attributes:
        unserved: why verification of this model needs the stock kernel; None where it does not.
    """

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self._num_processors = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.unserved = self._reason_for_stock_kernel(model_runner)

    def _reason_for_stock_kernel(self, model_runner: Any) -> str | None:
        if self.use_mla:
            return "multi-head latent attention"
        if model_runner.sliding_window_size is not None:
            return "sliding-window attention"
        for module in model_runner.model.modules():
            if type(module).__name__ == "RadixAttention" and (
                module.logit_cap > 0
                or module.k_scale is not None
                or module.qk_head_dim != module.v_head_dim
                or module.xai_temperature_len > 0
            ):
                return "capped, scaled or uneven attention heads"
        return None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Lay out a forward; our own verification needs nothing."""
        if not forward_batch.forward_mode.is_target_verify():
            super().init_forward_metadata(forward_batch)
        elif self.unserved:
            # The extend kernel behind stock verification reads the rows of each request from ``qo_indptr``, which the
            # base class fills for one number of rows.
            super().init_forward_metadata(forward_batch)
            layout = forward_batch.spec_info
            self.forward_metadata.qo_indptr = layout.indptr.to(torch.int32)
            self.forward_metadata.max_extend_len = layout.draft_token_num

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
        if self.unserved or not forward_batch.forward_mode.is_target_verify():
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, sinks)
        layout = forward_batch.spec_info
        k, v = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim), v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
        if save_kv_cache:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        attended = window_attention(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            k,
            v,
            self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            self.token_to_kv_pool.get_value_buffer(layer.layer_id),
            self.req_to_token,
            forward_batch.req_pool_indices,
            forward_batch.seq_lens,
            layout.indptr,
            width=layout.draft_token_num,
            causal=True,
            scale=layer.scaling,
            # Captured forwards have a slot for every request that might come; so many requests at least have rows.
            splits=num_splits(-(-len(q) // layout.draft_token_num), layer.tp_k_head_num, self._num_processors),
        )
        return attended.view(q.shape)
