"""Committing K/V of a Qwen3-4B drafter in bfloat16: verified blocks, kept in full or in part, and a prompt's chunk."""

from __future__ import annotations

from functools import partial

import torch
from dspark_kernels import CommitRows, kv_inject, kv_inject_ref
from harness import Case

LAYERS, KV_HEADS, HEAD_DIM = 5, 8, 128
GAMMA = 7
POOL_SLOTS = 1 << 16
PREFILL_ROWS = 8192
DTYPE = torch.bfloat16


def cases(device: torch.device) -> list[Case]:
    """Every batch size with all rows kept and with a random number of drafts accepted; one prefill chunk."""
    torch.manual_seed(0)
    pools = [torch.zeros(LAYERS, POOL_SLOTS, KV_HEADS, HEAD_DIM, dtype=DTYPE, device=device) for _ in range(2)]
    found = []
    for bs in (1, 8, 64, 256):
        columns = torch.arange(GAMMA + 1, device=device).repeat(bs)
        requests = torch.arange(bs, device=device).repeat_interleave(GAMMA + 1)
        for accepted in (torch.full((bs,), GAMMA), torch.randint(0, GAMMA + 1, (bs,))):
            rows = CommitRows(columns, requests, accepted.to(device))
            found.append(_case("kv_inject", pools, bs * (GAMMA + 1), int(accepted.sum()) + bs, rows, device))
    found.append(_case("kv_inject prefill", pools, PREFILL_ROWS, PREFILL_ROWS, None, device))
    return found


def _case(
    name: str, pools: list[torch.Tensor], num_rows: int, kept: int, rows: CommitRows | None, device: torch.device
) -> Case:
    width = LAYERS * 2 * KV_HEADS * HEAD_DIM
    arguments = (
        torch.randn(num_rows, width, device=device).to(DTYPE),
        torch.ones(LAYERS, HEAD_DIM, dtype=DTYPE, device=device),
        1e-6,
        1e6 ** (-torch.arange(0, HEAD_DIM, 2, device=device) / HEAD_DIM),
        torch.randint(0, 32768, (num_rows,), device=device),
        1 + torch.randperm(POOL_SLOTS - 1, device=device)[:num_rows],
        (pools[0], pools[1]),
        rows,
    )
    # Positions and slots of the kept rows, columns and requests of all.
    index_bytes = 16 * kept + (0 if rows is None else 16 * num_rows)
    return Case(
        name=name,
        shape={"rows": num_rows, "kept": kept, "L": LAYERS, "kv_heads": KV_HEADS, "hd": HEAD_DIM},
        run=partial(kv_inject, *arguments),
        reference=partial(kv_inject_ref, *arguments),
        bytes_moved=2 * kept * width * DTYPE.itemsize + index_bytes,
        flops=0,
    )
