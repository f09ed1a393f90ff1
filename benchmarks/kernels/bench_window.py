"""Attention of draft blocks and verification over paged contexts, one layer of models of several shapes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from dspark_kernels import PagedWindows, num_splits, widest_window, window_attention, window_attention_ref
from harness import Case

GAMMA = 7
CONTEXT = 1024
SHORT_CONTEXT = 100  # which no splits are worth
SHAPES = {  # heads, K/V heads, head dimension
    "SmolLM2-135M": (9, 3, 64),
    "Qwen3-4B": (32, 8, 128),
    "Llama-3.1-70B": (64, 8, 128),
    "Gemma-3-270M": (4, 1, 256),
    "Gemma-4-12B": (16, 1, 512),
}
WITH_WINDOWS = {  # targets, and what their layers with a window see
    "gpt-oss-20b": ((64, 8, 64), ", window of 128 and sinks"),
    "Gemma-4-12B, windows": ((16, 8, 256), ", window of 1024 in a pool of its own"),
}
OWN_POOL = "a pool of its own"
SIGHTS = {
    ", window and sinks": (300, False),
    ", window before the anchor and sinks": (300, True),
    ", window of 128 and sinks": (128, False),
    ", window of 1024 in a pool of its own": (1024, False),
}
DRAFT_SIGHTS = list(SIGHTS)[:2]
DTYPES = (torch.bfloat16, torch.float32)


def cases(device: torch.device) -> list[Case]:
    """Blocks, whose rows see each other, and verified windows, at every batch size; widest, short, sliding ones."""
    torch.manual_seed(0)
    usual = [
        _case(name, bs, GAMMA + causal, causal, device, pool_dtype=pool_dtype)
        for name in SHAPES
        for causal, pool_dtype in ((False, None), (True, None), (True, torch.float8_e4m3fn))
        for bs in (1, 8, 64, 256)  # small batches split the contexts
    ]
    widest = [
        _case(
            name, 8, widest_window(head_dim, dtype), True, device, dtype, note=f", widest in {8 * dtype.itemsize} bits"
        )
        for name, (*_, head_dim) in SHAPES.items()
        for dtype in DTYPES
    ]
    sliding = [_case("Qwen3-4B", bs, GAMMA, False, device, sight=sight) for sight in DRAFT_SIGHTS for bs in (1, 64)]
    sliding += [
        _case(name, bs, GAMMA + 1, True, device, sight=sight)
        for name, (_, sight) in WITH_WINDOWS.items()
        for bs in (1, 64)
    ]
    short = [_case(name, bs, GAMMA + 1, True, device, context=SHORT_CONTEXT) for name in SHAPES for bs in (1, 8)]
    return usual + widest + short + sliding


def _case(
    model: str,
    bs: int,
    width: int,
    causal: bool,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    pool_dtype: torch.dtype | None = None,
    sight: str = "",
    context: int = CONTEXT,
    note: str = "",
) -> Case:
    heads, kv_heads, head_dim = SHAPES[model] if model in SHAPES else WITH_WINDOWS[model][0]
    num_rows, num_slots = bs * width, 1 + bs * context
    q, k, v = (
        torch.randn(num_rows, heads + 2 * kv_heads, head_dim, device=device)
        .to(dtype)
        .split([heads, kv_heads, kv_heads], dim=1)
    )
    pool_dtype = pool_dtype or dtype
    k_pool, v_pool = (torch.randn(num_slots, kv_heads, head_dim, device=device).to(pool_dtype) for _ in range(2))
    # Pages lie apart, as in a pool that has been in use. Windows that are stored take the slots of some context.
    table = (1 + torch.randperm(bs * context, device=device)).to(torch.int32).view(bs, context)
    table = torch.cat([table, table[:, :width]], dim=1)
    indptr = torch.arange(0, num_rows + 1, width, device=device)
    lens = torch.full((bs,), context, device=device)
    windows = PagedWindows(table, torch.arange(bs, device=device), lens, indptr, width, *SIGHTS.get(sight, ()))
    if OWN_POOL in sight:
        windows = replace(windows, translation=torch.randperm(num_slots, device=device))
    is_stored = pool_dtype != dtype
    arguments = (q, None if is_stored else (k, v), (k_pool, v_pool), windows)
    sinks = torch.zeros(heads, dtype=dtype, device=device) if "sinks" in sight else None
    how = {"causal": causal, "scale": head_dim**-0.5, "sinks": sinks}
    seen = min(context, windows.sliding_window or context)
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
    splits = num_splits(bs, kv_heads, processors)
    kv_bytes = 2 * (bs * seen + num_rows) * kv_heads * head_dim * pool_dtype.itemsize
    return Case(
        name=f"window_attention {'verify' if causal else 'block'}{', 8 bits' if is_stored else sight}{note}, {model}",
        shape={"bs": bs, "rows": width, "context": context, "splits": splits, "bits": 8 * dtype.itemsize},
        run=partial(window_attention, *arguments, splits=splits, **how),
        reference=partial(window_attention_ref, *arguments, **how),
        bytes_moved=kv_bytes + 2 * num_rows * heads * head_dim * dtype.itemsize,
        flops=4 * num_rows * (seen + width) * heads * head_dim,
        capability=89 if is_stored else 80,
    )
