"""Flattening the tokens to be verified."""

from __future__ import annotations

from typing import Any

import torch

from sglang_dspark.step.state import DecodeBatch, VerifyPlan


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


def ragged_plan(
    decode: DecodeBatch, draft_tokens: torch.Tensor | None, verify_lens: torch.Tensor, num_tokens: int
) -> VerifyPlan:
    """Request r verifies its first ``verify_lens[r]`` drafts. No host sync: only their sum is known to the host.

    Args:
        draft_tokens: [bs, depth] int64, at least as deep as the longest length; may be None where all are 0.
        verify_lens: [bs] int64, on the worker's device.
        num_tokens: rows of the flattened batch: the lengths' sum plus one anchor each.
    """
    device = decode.anchors.device
    indptr = torch.nn.functional.pad((verify_lens + 1).cumsum(0), (1, 0))
    rows = torch.arange(num_tokens, device=device)
    requests = torch.searchsorted(indptr, rows, right=True) - 1
    on_host = device.type == "cpu"
    lens_cpu = verify_lens.tolist() if on_host else None
    depth = 0 if draft_tokens is None else draft_tokens.shape[1]
    return _flatten(
        decode,
        draft_tokens,
        verify_lens=verify_lens,
        lens_cpu=lens_cpu,
        width=(max(lens_cpu) if lens_cpu is not None else depth) + 1,
        indptr=indptr,
        requests=requests,
        columns=rows - indptr[requests],
    )


def _flatten(decode: DecodeBatch, draft_tokens: torch.Tensor | None, **layout: Any) -> VerifyPlan:
    requests, columns = layout["requests"], layout["columns"]
    window = decode.anchors[:, None]
    if draft_tokens is not None:
        window = torch.cat([window, draft_tokens], dim=1)
    positions = decode.prefix_lens[requests] + columns
    return VerifyPlan(
        **layout,
        input_ids=window[requests, columns],
        positions=positions,
        slots=decode.req_to_token[decode.req_pool_indices[requests], positions].to(torch.int64),
    )
