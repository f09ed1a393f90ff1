"""Attention of verification on a GPU, over ragged rows."""

from __future__ import annotations

from typing import Any

import torch
from dspark_kernels import PagedWindows, window_attention
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc


class CudaVerifyBackend(AttentionBackend):
    """TARGET_VERIFY over ragged rows, whose whole layout lies in ``forward_batch.spec_info``: nothing is planned.

    SGLang's backends verify as many rows for every request, and want index lists that are built for every step. Ours
    knows neither capped nor scaled scores, sliding windows nor heads of unequal sizes, and the architectures that are
    served have none of them (``draft.families``). It reads the pools of all backends that ``PREFILL_BACKENDS``
    names: [slots, heads, head_dim].
    """

    decode_attention_backend_str = "window_attention"

    def __init__(self, model_runner: Any) -> None:
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.req_to_token = model_runner.req_to_token_pool.req_to_token

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
        assert sinks is None, "no served architecture has attention sinks"
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
