"""Attention of verification on a GPU, over ragged rows."""

from __future__ import annotations

from typing import Any

import torch
from dspark_kernels import PagedWindows, window_attention
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from sglang_dspark.engine.forward.layers import sliding_window
from sglang_dspark.errors import ConfigError

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)
_READS_E4M3 = (8, 9)


def check_pool(dtype: torch.dtype, capability: tuple[int, int]) -> None:
    """Refuse a K/V cache that the kernels of verification cannot read; ``auto`` may stand for one of a checkpoint.

    Args:
        capability: of the GPU.

    Raises:
        ConfigError: naming the dtype and the remedy.
    """
    name = str(dtype).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise ConfigError(f"DSPARK cannot run with a K/V cache in {name}; pass --kv-cache-dtype bfloat16 or fp8_e4m3")
    if dtype == torch.float8_e4m3fn and capability < _READS_E4M3:
        raise ConfigError(
            f"DSPARK cannot run with a K/V cache in {name} on a GPU of compute capability "
            f"{'.'.join(map(str, capability))}, which is below 8.9; pass --kv-cache-dtype bfloat16"
        )


class CudaVerifyBackend(AttentionBackend):
    """TARGET_VERIFY over ragged rows, whose whole layout lies in ``forward_batch.spec_info``: nothing is planned.

    SGLang's backends verify as many rows for every request, and want index lists that are built for every step. Ours
    knows neither capped nor scaled scores nor heads of unequal sizes, and the architectures that are served have none
    of them (``draft.families``). It reads the pools of all backends that ``PREFILL_BACKENDS`` names: [slots, heads,
    head_dim]. Queries keep their dtype where the pool has eight bits.
    """

    decode_attention_backend_str = "window_attention"

    def __init__(self, model_runner: Any) -> None:
        check_pool(model_runner.kv_cache_dtype, torch.cuda.get_device_capability())
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.req_to_token = model_runner.req_to_token_pool.req_to_token

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Context of requests in SGLang's dummy forwards."""
        return 1

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
        """Attention of one target layer; verification rows as laid out by ``forward_batch.spec_info``.

        Args:
            sinks: [heads] one more score of each head of this rank, without a value.
        """
        layout, pool = forward_batch.spec_info, self.token_to_kv_pool
        k, v = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim), v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
        # A pool of another dtype holds rounded numbers, divided by the layer's scales where its checkpoint has any.
        is_rounded = pool.dtype != k.dtype
        k_scale, v_scale = (layer.k_scale_float, layer.v_scale_float) if is_rounded else (None, None)
        if save_kv_cache:
            # Divides k and v themselves: these are not read afterwards.
            pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v, k_scale, v_scale)
        attended = window_attention(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            None if is_rounded else (k, v),
            (pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)),
            PagedWindows(
                self.req_to_token,
                forward_batch.req_pool_indices,
                forward_batch.seq_lens,
                _indptr(layout, q),
                layout.draft_token_num,
                sliding_window=sliding_window(layer),
            ),
            causal=True,
            scale=layer.scaling * (k_scale or 1.0),
            sinks=sinks,
        )
        return (attended if v_scale is None else attended * v_scale).view(q.shape)


def _indptr(layout: Any, rows: torch.Tensor) -> torch.Tensor:
    """[bs + 1] int64, first row of each request; equal windows in the dummy forwards by which SGLang tunes experts."""
    indptr: torch.Tensor | None = getattr(layout, "indptr", None)
    return torch.arange(0, len(rows) + 1, layout.draft_token_num, device=rows.device) if indptr is None else indptr
