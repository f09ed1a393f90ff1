"""Attention of draft blocks and verification over paged contexts; norms with RoPE, and committing K/V, of a drafter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from cases import Case, case
from dspark_kernels import (
    CommitRows,
    HeldRows,
    PagedWindows,
    hold_rows,
    kv_inject,
    num_splits,
    qk_norm_rope,
    widest_window,
    window_attention,
)

_GAMMA = 7
_CONTEXT = 1024
_SHORT_CONTEXT = 100  # which no splits are worth
_SHAPES = {  # heads, K/V heads, head dimension
    "SmolLM2-135M": (9, 3, 64),
    "Qwen3-4B": (32, 8, 128),
    "Llama-3.1-70B": (64, 8, 128),
    "Gemma-3-270M": (4, 1, 256),
    "Gemma-4-12B": (16, 1, 512),
}
_WITH_WINDOWS = {  # targets, and what their layers with a window see
    "gpt-oss-20b": ((64, 8, 64), ", window of 128 and sinks"),
    "Gemma-4-12B, windows": ((16, 8, 256), ", window of 1024 in a pool of its own"),
}
_SIGHTS = {  # sliding window, and whether it is counted from the anchor
    ", window and sinks": (300, False),
    ", window before the anchor and sinks": (300, True),
    ", window of 128 and sinks": (128, False),
    ", window of 1024 in a pool of its own": (1024, False),
}
_LAYERS, (_HEADS, _KV_HEADS, _HEAD_DIM) = 5, _SHAPES["Qwen3-4B"]  # of its drafter, which taps as many layers
_HIDDEN_SIZE = 2560
_POOL_SLOTS = 1 << 16
_DTYPE = torch.bfloat16


def cases(device: torch.device) -> Iterator[Case]:
    """Yield draft blocks and verified windows (also wide, short, sliding, fixed ones), rotations and commits of K/V."""
    attend = partial(_attention, device)
    for name, (causal, pool_dtype), bs in product(
        _SHAPES, ((False, None), (True, None), (True, torch.float8_e4m3fn)), (1, 8, 64, 256)
    ):  # small batches split the contexts
        yield attend(name, bs, _GAMMA + causal, causal=causal, pool_dtype=pool_dtype)
    for (name, (*_, head_dim)), dtype in product(_SHAPES.items(), (torch.bfloat16, torch.float32)):
        note = f", widest in {8 * dtype.itemsize} bits"
        yield attend(name, 8, widest_window(head_dim, dtype), causal=True, dtype=dtype, note=note)
    for name, bs in product(_SHAPES, (1, 8)):
        yield attend(name, bs, _GAMMA + 1, causal=True, context=_SHORT_CONTEXT)
    for sight, bs in product(list(_SIGHTS)[:2], (1, 64)):
        yield attend("Qwen3-4B", bs, _GAMMA, causal=False, sight=sight)
    for (name, (_, sight)), bs in product(_WITH_WINDOWS.items(), (1, 64)):
        yield attend(name, bs, _GAMMA + 1, causal=True, sight=sight)
    for name, dtype in product([*_SHAPES, *_WITH_WINDOWS], (torch.bfloat16, torch.float32)):
        sight = _WITH_WINDOWS.get(name, (None, ""))[1]
        note = f", fixed tiles in {8 * dtype.itemsize} bits"
        yield attend(name, 8, _GAMMA + 1, causal=True, dtype=dtype, sight=sight, note=note, fixed_split=512)
    for bs in (1, 8, 64, 256):
        yield _rotation(bs * _GAMMA, device)
    yield from _injections(device)


def _attention(
    device: torch.device,
    model: str,
    bs: int,
    width: int,
    *,
    causal: bool,
    dtype: torch.dtype = _DTYPE,
    pool_dtype: torch.dtype | None = None,
    sight: str = "",
    context: int = _CONTEXT,
    note: str = "",
    fixed_split: int | None = None,
) -> Case:
    heads, kv_heads, head_dim = _SHAPES[model] if model in _SHAPES else _WITH_WINDOWS[model][0]
    num_rows, num_slots = bs * width, 1 + bs * context
    projected = torch.randn(num_rows, heads + 2 * kv_heads, head_dim, device=device).to(dtype)
    q, k, v = projected.split([heads, kv_heads, kv_heads], dim=1)
    pool_dtype = pool_dtype or dtype
    k_pool, v_pool = (torch.randn(num_slots, kv_heads, head_dim, device=device).to(pool_dtype) for _ in range(2))
    # Pages lie apart, as in a pool that has been in use. Windows that are stored take the slots of some context.
    table = (1 + torch.randperm(bs * context, device=device)).to(torch.int32).view(bs, context)
    table = torch.cat([table, table[:, :width]], dim=1)
    indptr = torch.arange(0, num_rows + 1, width, device=device)
    lens = torch.full((bs,), context, device=device)
    windows = PagedWindows(table, torch.arange(bs, device=device), lens, indptr, width, *_SIGHTS.get(sight, ()))
    if "pool of its own" in sight:
        windows = replace(windows, translation=torch.randperm(num_slots, device=device))
    windows = replace(windows, fixed_split=fixed_split)
    is_rounded = pool_dtype != dtype
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
    return case(
        window_attention,
        *(q, None if is_rounded or fixed_split else (k, v), (k_pool, v_pool), windows),
        splits=-(-(context + width) // fixed_split) if fixed_split else num_splits(bs, kv_heads, processors),
        causal=causal,
        scale=head_dim**-0.5,
        sinks=torch.zeros(heads, dtype=dtype, device=device) if "sinks" in sight else None,
        name=f"window_attention {'verify' if causal else 'block'}{', 8 bits' if is_rounded else sight}{note}, {model}",
        capability=89 if is_rounded else 80,
    )


def _rotation(num_rows: int, device: torch.device) -> Case:
    projected = torch.randn(num_rows, _HEADS + 2 * _KV_HEADS, _HEAD_DIM, device=device).to(_DTYPE)
    q, k, _ = projected.split([_HEADS, _KV_HEADS, _KV_HEADS], dim=1)
    weights = [torch.ones(_HEAD_DIM, dtype=_DTYPE, device=device) for _ in range(2)]
    positions = torch.randint(0, 32768, (num_rows,), device=device)
    return case(qk_norm_rope, q, k, *weights, 1e-6, _frequencies(device), positions)


def _injections(device: torch.device) -> Iterator[Case]:
    """Yield verified blocks, a chunk of a prompt, and non-speculative steps whose rows are held."""
    for bs in (1, 8, 64, 256):
        columns = torch.arange(_GAMMA + 1, device=device).repeat(bs)
        requests = torch.arange(bs, device=device).repeat_interleave(_GAMMA + 1)
        accepted = torch.randint(0, _GAMMA + 1, (bs,), device=device)
        yield _injection(device, "kv_inject", bs * (_GAMMA + 1), CommitRows(columns, requests, accepted))
    yield _injection(device, "kv_inject prefill", 8192, None)
    for bs in (1, 64):
        features = torch.randn(bs, _LAYERS * _HIDDEN_SIZE, device=device).to(_DTYPE)
        numbers = torch.ones(bs, dtype=torch.int64, device=device)
        yield case(hold_rows, features, numbers, numbers, HeldRows.empty(512, features.shape[1], _DTYPE, device))


def _injection(device: torch.device, name: str, num_rows: int, rows: CommitRows | None) -> Case:
    sizes = _LAYERS, _POOL_SLOTS, _KV_HEADS, _HEAD_DIM
    pools = torch.zeros(*sizes, dtype=_DTYPE, device=device), torch.zeros(*sizes, dtype=_DTYPE, device=device)
    return case(
        kv_inject,
        torch.randn(num_rows, _LAYERS * 2 * _KV_HEADS * _HEAD_DIM, device=device).to(_DTYPE),
        torch.ones(_LAYERS, _HEAD_DIM, dtype=_DTYPE, device=device),
        *(1e-6, _frequencies(device), torch.randint(0, 32768, (num_rows,), device=device)),
        *(1 + torch.randperm(_POOL_SLOTS - 1, device=device)[:num_rows], pools, rows),
        name=name,
    )


def _frequencies(device: torch.device) -> torch.Tensor:
    return 1e6 ** (-torch.arange(0, _HEAD_DIM, 2, device=device) / _HEAD_DIM)
