"""Tells requests that ask for it what became of each of their drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_dspark.engine.batch import per_token
from sglang_dspark.engine.request_options import request_options
from sglang_dspark.engine.sglang_types import Req
from sglang_dspark.fence import fenced, nothing
from sglang_dspark.step.record import StepRecord


@fenced("traces", instead=nothing)
def trace(reqs: Sequence[Req], record: StepRecord, running: Sequence[int], accepted: Sequence[int]) -> None:
    """Append a step to the trace of every request that asked for one.

    ``customized_info`` lists are parallel to a request's output tokens (SGLang slices them so when it streams): the
    round stands at the first token that it committed, null at the others. Null also takes the place of drafts from
    earlier answers: they are what other users of the key were answered.

    Args:
        reqs: SGLang's requests of the step.
        record, running, accepted: see :meth:`~sglang_dspark.engine.part.Part.step_done`.
    """
    if record.traced is None:
        return
    logits = None if record.confidence is None else record.confidence.logits
    confidences = [None] * len(reqs) if logits is None else logits.tolist()
    kinds = (record.drafted, record.copied, record.followed, record.cached, record.from_answers)
    of_requests = list(zip(record.traced.tolist(), *kinds, confidences, record.verified, strict=True))
    for request, kept in zip(running, accepted, strict=True):
        if request_options(reqs[request]).trace:
            _add_round(reqs[request], record.num_drawn, of_requests[request], kept)


@fenced("rounds of a trace", instead=nothing)
def _add_round(req: Req, num_drawn: int | None, of_request: Sequence[Any], accepted: int) -> None:
    traced, depth, copied, followed, cached, from_answers, confidence, verified = of_request
    start, anchor, *draft = traced
    # Behind the drafter's block all drafts are the chain's, whether the block has followed it or not.
    shown = range(cached, num_drawn if from_answers and num_drawn is not None else len(draft))
    rounds = per_token(req, "dspark_trace")
    rounds.extend([None] * (len(req.output_ids) - len(rounds)))
    round_ = {
        "start": start,
        "anchor": anchor,
        "draft": [token if place in shown else None for place, token in enumerate(draft[: depth or copied])],
        "copied": copied > 0,
        "from_text": followed,
        "from_cache": cached,
        "confidence": confidence[:depth] if confidence is not None and depth else None,
        "verified": verified,
        "accepted": accepted,
    }
    rounds += [round_, *[None] * accepted]
