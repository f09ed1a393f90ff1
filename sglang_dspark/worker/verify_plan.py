"""Flattening the tokens to be verified, by single launches or by numbers that a captured plan reads."""

from __future__ import annotations

import torch
from dspark_kernels import PlanNumbers, StepRequests, plan_lens, plan_top, plan_uniform

from sglang_dspark.scheduling.admission import Admitted, Best, Lengths, Uniform
from sglang_dspark.scheduling.selection import top_prefixes
from sglang_dspark.step.choice import Choice, Rule
from sglang_dspark.step.state import VerifyPlan


def lay_out(
    requests: StepRequests, tokens: torch.Tensor, admitted: Admitted, into: VerifyPlan | None = None
) -> VerifyPlan:
    """Lay the anchors and the admitted drafts out, request by request.

    No host sync, but for lengths whose sum only the device knows.

    Args:
        tokens: [bs, depth] int64 the drafts.
        into: buffers of a tier that has room for them; rows behind the last token are padding. By default the batch
            has exactly the rows that it needs.
    """
    bs, depth = len(requests), tokens.shape[1]
    room = None if into is None else len(into.input_ids)
    match admitted:
        case Uniform(verify_len):
            rows = plan_uniform(verify_len, tokens, requests, room or bs * (verify_len + 1), into)
            depth = verify_len
        case Best(order, budget, exact) if room is None and not exact:
            lens = top_prefixes(order, budget)
            rows = plan_lens(lens, tokens, requests, bs + _sum_on_host(lens))
        case Best(order, budget):
            rows = plan_top(order, budget, tokens, requests, room or bs + budget, into)
        case Lengths(lens):
            assert room is None, "how many rows these need, only the device knows"
            rows = plan_lens(lens, tokens, requests, bs + _sum_on_host(lens))
    return VerifyPlan.of(rows, depth + 1) if into is None else into


def _sum_on_host(lens: torch.Tensor) -> int:
    """Waits for the device."""
    return int(lens.sum())


def plan_numbers(choice: Choice, requests: int) -> PlanNumbers | None:
    """What a captured plan does by ``choice``; None where requests have bounds, or nobody ranks drafts for all."""
    if choice.is_uniform(requests):
        return PlanNumbers(verify_len=choice.depth)
    if choice.rule is not Rule.TOP or choice.limits or choice.drafted or not choice.with_confidence:
        return None
    return PlanNumbers(choice.budget, forced=-1 if choice.forced is None else choice.forced)
