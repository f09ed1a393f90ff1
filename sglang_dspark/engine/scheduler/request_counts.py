"""How many drafts each request had, in the ``meta_info`` of its answer.

SGLang carries counts of every request to the answer, but takes it that all drafts are verified in every step. The
number that really were travels with them: as negative entries behind the histogram of accepted drafts, where nothing
else can be negative, and only when the request has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sglang_dspark.step.record import StepRecord


def count(reqs: Sequence[Any], rounds: StepRecord, running: Sequence[int]) -> None:
    """Add a step to the requests ``running`` of ``reqs``; a plain one adds nothing."""
    if not (any(rounds.drafted) or any(rounds.verified)):
        return
    for index in running:
        req = reqs[index]
        drafted, verified = getattr(req, "dspark_counts", (0, 0))
        req.dspark_counts = drafted + rounds.drafted[index], verified + rounds.verified[index]


def attach(result: None, processor: Any, req: Any) -> None:
    """Hook where SGLang completes a request that has ended, before its last output leaves the scheduler.

    SGLang has counted all tokens of the last step that belong to the reasoning, those behind the end too. Reasoning
    stands at the beginning of a text, so it has at most as many tokens as the text.
    """
    req.reasoning_tokens = min(req.reasoning_tokens, len(req.output_ids_through_stop))
    if req.spec_verify_ct:
        counts = getattr(req, "dspark_counts", (0, 0))
        req.spec_correct_drafts_histogram = [*req.spec_correct_drafts_histogram, *(-1 - number for number in counts)]


def report(original: Callable[..., None], manager: Any, meta_info: dict[str, Any], recv_obj: Any, i: int) -> None:
    """Hook around SGLang's figures of a request that has ended: ``dspark``, and what follows from the real counts."""
    histograms = recv_obj.spec_correct_drafts_histogram
    attached = [-1 - entry for entry in histograms[i] if entry < 0] if histograms and i < len(histograms) else []
    if not attached:
        original(manager, meta_info, recv_obj, i)
        return
    histograms[i] = [entry for entry in histograms[i] if entry >= 0]
    original(manager, meta_info, recv_obj, i)
    drafted, verified = attached
    rounds, accepted = recv_obj.spec_verify_ct[i], recv_obj.spec_num_correct_drafts[i]
    meta_info["dspark"] = {
        "rounds": rounds,
        "drafted_tokens": drafted,
        "verified_tokens": verified,
        "accepted_tokens": accepted,
        "accept_length": (accepted + rounds) / rounds,
    }
    if "spec_accept_rate" in meta_info:
        meta_info["spec_accept_rate"] = accepted / verified if verified else 0.0
        meta_info["spec_num_proposed_drafts"] = verified
