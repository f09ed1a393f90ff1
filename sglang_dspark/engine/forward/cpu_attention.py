"""Attention of verification on a CPU, over ragged rows."""

from __future__ import annotations

from typing import Any

import torch
from dspark_kernels import attend_groups
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from sglang_dspark.engine.forward.layers import sliding_window


class CpuVerifyBackend(AttentionBackend):
    """TARGET_VERIFY over ragged rows, which ``torch_native`` does not have; its cost is linear in the context."""

    decode_attention_backend_str = "grouped SDPA"

    def __init__(self, model_runner: Any) -> None:
        self.token_to_kv_pool, self.req_to_token_pool = model_runner.token_to_kv_pool, model_runner.req_to_token_pool

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
        """Attention of one target layer; verification rows as laid out by ``forward_batch.spec_info.groups``.

        Args:
            sinks: [heads] one more score of each head of this rank, without a value.
        """
        if save_kv_cache:
            location = KVWriteLoc(forward_batch.out_cache_loc, None)
            k, v = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim), v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
            self.token_to_kv_pool.set_kv_buffer(layer, location, k, v)
        k_pool = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        v_pool = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        groups = forward_batch.spec_info.groups(sliding_window(layer))
        return attend_groups(queries, k_pool, v_pool, groups, layer.scaling, sinks=sinks).reshape(q.shape)
