"""Tells OpenAI clients what became of a request's drafts: ``metrics.speculative_decoding`` of an answer.

The field and its form are vLLM's (``--per-request-spec-decode-metrics summary``). AIPerf reads it.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from functools import cache
from typing import Any, TypedDict

from pydantic import BaseModel, create_model
from sglang.srt.plugins.hook_registry import HookType

from sglang_dspark.engine.hooks import Moment, hook
from sglang_dspark.engine.server import tokens_per_step
from sglang_dspark.engine.sglang_types import Answer
from sglang_dspark.fence import fenced, nothing

_WHY = "SGLang has no place for what benchmarks read of the drafts of one request"
_DONE = "data: [DONE]"
NOTED = "dspark_meta_info"
"""Where a request that SGLang's serving class has made keeps the counts of its whole answer."""


class RequestCounts(TypedDict):
    """Holds what became of a request's drafts."""

    rounds: int
    drafted_tokens: int
    verified_tokens: int
    accepted_tokens: int
    accept_length: float


class MetaInfo(TypedDict, total=False):
    """``meta_info`` of an answer, as far as we touch it."""

    dspark: RequestCounts
    spec_correct_drafts_histogram: list[int]
    spec_block_accept_length: float
    spec_accept_rate: float
    spec_num_proposed_drafts: int


@fenced("acceptance of requests", instead=nothing)
def acceptance(meta_info: MetaInfo) -> dict[str, object] | None:
    """Return the acceptance of one request, None if it took part in no decode step.

    Drafts that the schedule left out are none of ``num_draft_tokens``: these went through the target.

    Args:
        meta_info: of its whole answer, see :func:`~sglang_dspark.features.reports.request_counts.report`.
    """
    counts = meta_info.get("dspark")
    if counts is None:
        return None
    verified, accepted = counts["verified_tokens"], counts["accepted_tokens"]
    return {
        "mean_acceptance_length": counts["accept_length"],
        "draft_acceptance_rate": accepted / verified if verified else 0.0,
        "acceptance_histogram": meta_info["spec_correct_drafts_histogram"],
        "num_spec_steps": counts["rounds"],
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": verified,
        "num_spec_tokens": tokens_per_step() - 1,
    }


@hook(
    "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._build_chat_response",
    HookType.AFTER,
    where="front_end",
    reason=_WHY,
    by=Moment.SOME_TIME,
)
@hook(
    "sglang.srt.entrypoints.openai.serving_completions.OpenAIServingCompletion._build_completion_response",
    HookType.AFTER,
    where="front_end",
    reason=_WHY,
    by=Moment.SOME_TIME,
)
@fenced("acceptance of requests", instead=nothing)
def add_acceptance(
    response: object, serving: object, request: object, answers: Sequence[Answer], _: int
) -> BaseModel | None:
    """Hook after SGLang has built a response of one generation: return it with the field, or None to leave it.

    As in vLLM, several samples or prompts have none.
    """
    found = acceptance(answers[0]["meta_info"]) if len(answers) == 1 else None
    if found is None or not isinstance(response, BaseModel):
        return None
    return _with_metrics(type(response)).model_construct(**dict(response), metrics={"speculative_decoding": found})


@cache
def _with_metrics(kind: type[BaseModel]) -> type[BaseModel]:
    return create_model(kind.__name__, __base__=kind, metrics=(dict[str, Any], ...))


@hook(
    "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._generate_chat_stream",
    HookType.AROUND,
    where="front_end",
    reason=_WHY,
    by=Moment.SOME_TIME,
)
@hook(
    "sglang.srt.entrypoints.openai.serving_completions.OpenAIServingCompletion._generate_completion_stream",
    HookType.AROUND,
    where="front_end",
    reason=_WHY,
    by=Moment.SOME_TIME,
)
async def stream_with_acceptance(
    original: Callable[..., AsyncIterator[str]], serving: object, adapted: object, *args: object, **kwargs: object
) -> AsyncIterator[str]:
    """Yield the events of a stream, the last one before ``[DONE]`` with the field. A hook.

    Nothing waits: an event is held back once the engine has given its whole answer, and not before.
    """
    held = None
    async for event in original(serving, adapted, *args, **kwargs):
        meta_info = getattr(adapted, NOTED, None)
        if meta_info is None:
            yield event
            continue
        if held is not None:
            yield _extended(held, meta_info) if event.startswith(_DONE) else held
        held = event
    if held is not None:
        yield held


@fenced("acceptance of requests", instead=lambda event, meta_info: event)
def _extended(event: str, meta_info: MetaInfo) -> str:
    """Return an event with the field; one that is no part of the answer, an error, as it is."""
    start, data, rest = event.partition("data: ")
    found, chunk = acceptance(meta_info), json.loads(rest)
    if found is None or "choices" not in chunk:
        return event
    return f"{start}{data}{json.dumps(chunk | {'metrics': {'speculative_decoding': found}}, ensure_ascii=False)}\n\n"
