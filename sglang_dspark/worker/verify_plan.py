"""Flattening the tokens to be verified, where the step is not one of CUDA graphs."""

from __future__ import annotations

import torch
from dspark_kernels import plan_lens, plan_top, plan_uniform, plan_uniform_ref

from sglang_dspark.step.state import DecodeBatch, VerifyPlan


def uniform_plan(decode: DecodeBatch, draft_tokens: torch.Tensor | None, verify_len: int) -> VerifyPlan:
    """Every request verifies its first ``verify_len`` drafts. No host sync.

    Args:
        draft_tokens: [bs, at least verify_len] int64; may be None where ``verify_len`` is 0.
    """
    bs, width = len(decode), verify_len + 1
    if not _on_host(decode):
        rows = plan_uniform(verify_len, draft_tokens, decode.requests, bs * width)
        return VerifyPlan(**vars(rows), lens_cpu=None, width=width)
    rows = plan_uniform_ref(verify_len, draft_tokens, decode.requests, bs * width)
    return VerifyPlan(**vars(rows), lens_cpu=[verify_len] * bs, width=width)


def top_plan(decode: DecodeBatch, draft_tokens: torch.Tensor, order: torch.Tensor, budget: int) -> VerifyPlan:
    """The ``budget`` drafts that rank highest are verified; on a GPU, in one launch. No host sync.

    Args:
        draft_tokens: [bs, depth] int64.
        order: [bs, depth] what they rank by, as in ``worker.candidates.ranked``; that many at least may be verified.
    """
    rows = plan_top(order, budget, draft_tokens, decode.requests, len(decode) + budget)
    return VerifyPlan(**vars(rows), lens_cpu=None, width=order.shape[1] + 1)


def ragged_plan(
    decode: DecodeBatch, draft_tokens: torch.Tensor | None, verify_lens: torch.Tensor, num_tokens: int
) -> VerifyPlan:
    """Request r verifies its first ``verify_lens[r]`` drafts. No host sync: only their sum is known to the host.

    Args:
        draft_tokens: [bs, depth] int64, at least as deep as the longest length; may be None where all are 0.
        verify_lens: [bs] int64, on the worker's device.
        num_tokens: rows of the flattened batch: the lengths' sum plus one anchor each.
    """
    rows = plan_lens(verify_lens, draft_tokens, decode.requests, num_tokens)
    if _on_host(decode):
        lens = verify_lens.tolist()
        return VerifyPlan(**vars(rows), lens_cpu=lens, width=max(lens) + 1)
    depth = 0 if draft_tokens is None else draft_tokens.shape[1]
    return VerifyPlan(**vars(rows), lens_cpu=None, width=depth + 1)


def _on_host(decode: DecodeBatch) -> bool:
    return decode.anchors.device.type == "cpu"
