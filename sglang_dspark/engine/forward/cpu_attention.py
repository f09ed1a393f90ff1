"""SGLang's CPU attention backend with a verification path whose cost is linear in the context."""

from __future__ import annotations

from typing import Any

import torch
from dspark_kernels import attend_groups
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc


class CpuVerifyBackend(TorchNativeAttnBackend):
    """``torch_native``, plus TARGET_VERIFY over ragged rows, which the stock backend does not have.

    Prefill and everything else stay SGLang's own, so a prompt is encoded exactly as on a server without DSPARK.
    """

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> torch.Tensor:
        """Attention of one target layer; verification rows as laid out by ``forward_batch.spec_info.groups``."""
        if not forward_batch.forward_mode.is_target_verify():
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        if save_kv_cache:
            location = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, location, k, v)
        k_pool = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        v_pool = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        return attend_groups(queries, k_pool, v_pool, forward_batch.spec_info.groups, layer.scaling).reshape(q.shape)
