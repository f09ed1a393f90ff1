"""Flattening the tokens to be verified."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sglang_dspark.worker.state import DecodeBatch, VerifyPlan


def uniform_plan(decode: DecodeBatch, draft_tokens: torch.Tensor | None, verify_len: int) -> VerifyPlan:
    """Every request verifies its first ``verify_len`` drafts. No host sync.

    Args:
        draft_tokens: [bs, at least verify_len] int64; may be None where ``verify_len`` is 0.
    """
    bs, width = len(decode), verify_len + 1
    device = decode.anchors.device
    rows = torch.arange(bs * width, device=device)
    return _flatten(
        decode,
        draft_tokens,
        verify_lens=torch.full((bs,), verify_len, dtype=torch.int64, device=device),
        lens_cpu=[verify_len] * bs if device.type == "cpu" else None,
        width=width,
        indptr=torch.arange(0, (bs + 1) * width, width, device=device),
        requests=rows // width,
        columns=rows % width,
    )


def ragged_plan(decode: DecodeBatch, draft_tokens: torch.Tensor | None, lens_cpu: Sequence[int]) -> VerifyPlan:
    """Request r verifies its first ``lens_cpu[r]`` drafts; the lengths are known to the host.

    Args:
        draft_tokens: [bs, at least max(lens_cpu)] int64; may be None where all lengths are 0.
    """
    device = decode.anchors.device
    lens = torch.tensor(lens_cpu, dtype=torch.int64)
    width = int(lens.max()) + 1
    requests, columns = (torch.arange(width) <= lens[:, None]).nonzero(as_tuple=True)
    return _flatten(
        decode,
        draft_tokens,
        verify_lens=lens.to(device),
        lens_cpu=list(lens_cpu),
        width=width,
        indptr=torch.nn.functional.pad((lens + 1).cumsum(0), (1, 0)).to(device),
        requests=requests.to(device),
        columns=columns.to(device),
    )


def _flatten(decode: DecodeBatch, draft_tokens: torch.Tensor | None, **layout: Any) -> VerifyPlan:
    requests, columns = layout["requests"], layout["columns"]
    window = decode.anchors[:, None]
    if draft_tokens is not None:
        window = torch.cat([window, draft_tokens], dim=1)
    return VerifyPlan(
        **layout,
        input_ids=window[requests, columns],
        positions=decode.block_positions[requests, columns],
        slots=decode.window_slots[requests, columns],
    )
