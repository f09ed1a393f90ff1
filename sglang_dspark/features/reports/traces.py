"""Tells requests what became of their drafts: counts in the ``meta_info`` of each answer, a trace if asked for.

SGLang carries the counts of every request to its answer. It takes the drafts of every step to be as many as a step may
have, so what follows from the real number is corrected here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_dspark.engine.batch import per_token
from sglang_dspark.engine.hooks import hook
from sglang_dspark.engine.request_options import request_options
from sglang_dspark.engine.sglang_types import Req, TokenizerManager
from sglang_dspark.errors import best_effort, nothing
from sglang_dspark.step.decision import StepRecord

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import BatchStrOutput, BatchTokenIDOutput


@best_effort("traces", instead=nothing)
def trace_step(reqs: Sequence[Req], record: StepRecord, running: Sequence[int], accepted: Sequence[int]) -> None:
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
    kinds = (record.drafted, record.from_request, record.from_text, record.from_cache, record.from_answers)
    of_requests = list(zip(record.traced.tolist(), *kinds, confidences, record.verified, strict=True))
    for request, kept in zip(running, accepted, strict=True):
        if request_options(reqs[request]).trace:
            _add_round(reqs[request], record.num_drawn, of_requests[request], kept)


@best_effort("rounds of a trace", instead=nothing)
def _add_round(req: Req, num_drawn: int | None, of_request: Sequence[Any], accepted: int) -> None:
    traced, depth, copied, followed, cached, from_answers, confidence, verified = of_request
    start, anchor, *draft = traced
    # After the drafter's block all drafts are the chain's, whether the block has followed it or not.
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


@hook(
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics",
    HookType.AFTER,
    where="front_end",
    reason="SGLang assumes that every draft is verified, and understates the acceptance of requests",
)
@best_effort("counts of requests", instead=nothing)
def count_drafts(
    result: None,
    manager: TokenizerManager,
    meta_info: dict[str, Any],
    recv_obj: BatchStrOutput | BatchTokenIDOutput,
    i: int,
) -> None:
    """Add ``dspark`` to the ``meta_info`` of an ended request with a decode step, and correct SGLang's figures.

    Args:
        recv_obj: a batch of SGLang's outputs; ``DSparkBatchResult`` says what it counts.
        i: index of the request in it.
    """
    rounds = recv_obj.spec_verify_ct[i] if getattr(recv_obj, "spec_verify_ct", None) else 0
    if not rounds:
        return
    accepted, verified = recv_obj.spec_num_correct_drafts[i], recv_obj.spec_num_cap_tokens[i] - rounds
    meta_info["dspark"] = {
        "rounds": rounds,
        "drafted_tokens": int(recv_obj.spec_num_block_accept_tokens[i]),  # see request_options.carry_counts
        "verified_tokens": verified,
        "accepted_tokens": accepted,
        "accept_length": (accepted + rounds) / rounds,
    }
    meta_info.pop("spec_block_accept_length", None)  # if SGLang has carried the proposed drafts under its name
    if "spec_accept_rate" in meta_info:
        meta_info["spec_accept_rate"] = accepted / verified if verified else 0.0
        meta_info["spec_num_proposed_drafts"] = verified
