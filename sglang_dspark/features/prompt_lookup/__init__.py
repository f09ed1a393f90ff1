"""Prompt lookup: tokens that came before in a text, or that a request names, are drafted where they fit.

OpenAI's field ``prediction`` of a chat is a key of ``speculation`` on the way in, and counts of a usage on the way out.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from functools import partial

import torch
from dspark_kernels import Candidates, ChainRules, find_chains, usual_bounds
from fastapi import FastAPI
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.plugins.hook_registry import HookType
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sglang_dspark.engine.batch import CachedByBatch, DSparkBatchResult, is_running, per_token, prompts_of
from sglang_dspark.engine.feature import Feature
from sglang_dspark.engine.hooks import hook
from sglang_dspark.engine.http import object_with, read_body, replayed, without_root
from sglang_dspark.engine.part import CandidateSource, Worker
from sglang_dspark.engine.requests import ASKED
from sglang_dspark.engine.server import DSparkServer, attached
from sglang_dspark.engine.sglang_types import Answer, Req, ScheduleBatch, ServerArgs, TokenizerManager
from sglang_dspark.errors import best_effort, nothing
from sglang_dspark.features.prompt_lookup.keys import COUNTS, LookupKeys, answer_key, lookup_options
from sglang_dspark.features.prompt_lookup.rules import AnswerCache, ForcedTokens, rules_of, with_forced
from sglang_dspark.step.decision import StepRecord
from sglang_dspark.step.state import DecodeBatch


class PromptLookup(CandidateSource):
    """Look up the ends of requests' texts in the texts themselves, and in what their requests name.

    Args:
        answers: of earlier requests.
        forced: reads what grammars force.
        device: where steps are.
    """

    def __init__(self, answers: AnswerCache, forced: ForcedTokens, device: torch.device) -> None:
        self._answers, self._forced, self._device = answers, forced, device
        self._rules = CachedByBatch(partial(rules_of, device=device, answers=answers))
        # Places of requests that have a prediction.
        self._predicted = CachedByBatch(lambda reqs: [i for i, req in enumerate(reqs) if lookup_options(req).predicted])

    @classmethod
    def of(cls, worker: Worker) -> PromptLookup:
        """Return the part of a worker."""
        target = worker.target_worker
        vocab_size = int(target.model_runner.model_config.vocab_size)
        options = worker.options
        answers = AnswerCache(10**6 * (options.answer_cache or 0), by_prompt=options.answer_cache_key == "prompt")
        return cls(answers, ForcedTokens(target.tokenizer, vocab_size, worker.max_verify + 1), worker.device)

    def rules(self, batch: ScheduleBatch) -> ChainRules | None:
        reqs = batch.reqs
        rules = self._rules.read(reqs)
        if batch.has_grammar and any(forced := [self._forced.of(req) for req in reqs]):
            rules = with_forced(rules, reqs, forced, self._device)
        return rules

    def names_drafts(self, req: Req) -> bool:
        return lookup_options(req).names_drafts

    @best_effort(
        "candidates", instead=lambda part, step, tokens, number: Candidates.no_chains(len(step), number, tokens.device)
    )
    def find(self, step: DecodeBatch, slot_tokens: torch.Tensor, number: int) -> torch.Tensor:
        return find_chains(step.requests, slot_tokens, number, step.rules)

    def buffers(self, slots: int) -> StagedRules:
        return StagedRules(slots, self._device)

    @best_effort("counts of predictions", instead=nothing)
    def prefill_done(self, batch: ScheduleBatch) -> None:
        """Give the token after a prompt its counts: SGLang streams such lists from their first place on."""
        prompts = prompts_of(batch)
        for place in self._predicted.read(prompts):
            _counts(prompts[place], 1)

    @best_effort("counts of predictions", instead=nothing)
    def tokens_come(self, batch: ScheduleBatch, result: DSparkBatchResult, tokens: Sequence[Sequence[int]]) -> None:
        for place in self._predicted.read(batch.reqs):
            if result.record is not None and is_running(batch.reqs[place]):
                _count(batch.reqs[place], result.record, place, len(tokens[place]))

    @best_effort("counts of predictions", instead=nothing)
    def step_done(
        self, reqs: Sequence[Req], record: StepRecord, running: Sequence[int], accepted: Sequence[int]
    ) -> None:
        """Give a token that came with a prompt its counts; those of other steps have theirs."""
        for place in self._predicted.read(reqs):
            if place in running:
                _counts(reqs[place], 1)

    @best_effort("answers to keep", instead=nothing)
    def request_ended(self, req: Req) -> None:
        """Keep the answer of a request that was not aborted, if it has a key."""
        key = answer_key(req, by_prompt=self._answers.by_prompt)
        if key and not isinstance(req.finished_reason, FINISH_ABORT):
            self._answers.keep(key, req.output_ids_through_stop)

    def flushed(self) -> None:
        self._answers.clear()

    weights_changed = flushed  # the target would answer otherwise


def _count(req: Req, record: StepRecord, place: int, committed: int) -> None:
    """Note for each token that a request has committed what it and those before it owe to its prediction."""
    entries = _counts(req, 0)
    accepted, rejected = entries[-1] if entries else (0, 0)
    verified = min(record.from_request[place], record.verified[place])
    kept = min(verified, committed - 1)
    entries += [(accepted + min(token + 1, kept), rejected + verified - kept) for token in range(committed)]


def _counts(req: Req, coming: int) -> list[tuple[int, int]]:
    """Return the counts up to each output token of a request, and to so many that are about to come."""
    entries: list[tuple[int, int]] = per_token(req, COUNTS)
    entries += [entries[-1] if entries else (0, 0)] * (len(req.output_ids) + coming - len(entries))
    return entries


class StagedRules:
    """The bounds that captured searches read. Named texts have no bounded size, so steps that have some are launched.

    Args:
        slots: requests of the largest captured step.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        self._bounds = usual_bounds(device).repeat(slots, 1)
        self._asked = False  # whether the last step's requests had bounds of their own

    def stage(self, step: DecodeBatch) -> None:
        """Copy the bounds of a step."""
        if step.rules is not None:
            self._bounds[: len(step)] = step.rules.bounds
        elif self._asked:
            self._bounds.copy_(usual_bounds(self._bounds.device))
        self._asked = step.rules is not None

    def first(self, slots: int) -> ChainRules:
        """Return the staged rules of so many requests."""
        return ChainRules(self._bounds[:slots])


FIELD, CHAT_ROUTE = "prediction", "/v1/chat/completions"
_DETAILS = "completion_tokens_details"

Counts = dict[str, tuple[int, int]]
"""Predicted tokens accepted and rejected up to now, by the id of each sample."""

_COUNTS: ContextVar[Counts | None] = ContextVar("prediction", default=None)


def add_predictions(app: FastAPI, target_only: str | None) -> None:
    """Have SGLang's application read the field; a server without drafts has nothing to predict for."""
    app.user_middleware.append(Middleware(Predictions))


class Predictions:
    """Serves the field: within the middleware of ``speculation``, whose key it becomes.

    Args:
        app: what it wraps.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or without_root(scope["path"], scope.get("root_path", "")) != CHAT_ROUTE:
            await self.app(scope, receive, send)
            return
        body = await read_body(scope, receive)
        if body is None:
            return
        asked = _with_prediction(ASKED.get(), body)
        if asked is None:
            await self.app(scope, replayed(body, receive), send)
            return
        counts: Counts = {}
        before = ASKED.set(asked), _COUNTS.set(counts)
        try:
            await self.app(scope, replayed(body, receive), _Counting(send, counts))
        finally:
            ASKED.reset(before[0])
            _COUNTS.reset(before[1])


def _with_prediction(asked: str | None, body: bytes) -> str | None:
    """Return the field ``speculation`` with the prediction of a body; None if that has none, or cannot be read."""
    document = object_with(body, FIELD)
    if document is None or document[FIELD] is None:
        return None
    try:
        field = {} if asked is None else json.loads(asked)
    except (ValueError, RecursionError):
        field = asked
    if not isinstance(field, dict | None):
        return None  # refused as what it is
    return json.dumps({**(field or {}), FIELD: document[FIELD]})


class _Counting:
    """Sends an answer on, with the counts in each usage.

    Args:
        send: of the ASGI application.
        counts: are complete when the answer has been sent.
    """

    def __init__(self, send: Send, counts: Counts) -> None:
        self._send, self._counts = send, counts
        self._start: Message | None = None  # of an answer that is sent as a whole
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = dict(message["headers"])
            if headers.get(b"content-type", b"").startswith(b"application/json"):
                self._start = message
                return
        elif message["type"] == "http.response.body" and self._start is not None:
            self._body += message.get("body", b"")
            if message.get("more_body"):
                return
            body = self._counted(self._body)
            length = (b"content-length", str(len(body)).encode())
            others = [header for header in self._start["headers"] if header[0] != b"content-length"]
            await self._send({**self._start, "headers": [*others, length]})
            await self._send({"type": "http.response.body", "body": body})
            return
        elif message["type"] == "http.response.body" and b'"usage"' in message.get("body", b""):
            events = message["body"].split(b"\n\n")
            message = {**message, "body": b"\n\n".join(map(self._counted_event, events))}
        await self._send(message)

    def _counted_event(self, event: bytes) -> bytes:
        name, mark, data = event.partition(b"data: ")
        return name + mark + self._counted(data) if mark and not name and b'"usage"' in data else event

    @best_effort("usages of predictions", instead=lambda self, body: body)
    def _counted(self, body: bytes) -> bytes:
        """Return JSON with the counts in its usage; an error without one names the field that the client has sent."""
        document = json.loads(body)
        if not isinstance(document.get("usage"), dict):
            return body.replace(b"speculation." + FIELD.encode(), FIELD.encode())
        accepted, rejected = (sum(counts) for counts in zip((0, 0), *self._counts.values(), strict=True))
        details = document["usage"].get(_DETAILS) or {}
        found = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
        document["usage"][_DETAILS] = details | found
        return json.dumps(document, ensure_ascii=False).encode()


@hook(
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request",
    HookType.AROUND,
    where="front_end",
    reason="SGLang's usage has no place for what became of a prediction",
)
async def keep_counts(
    original: Callable[..., AsyncGenerator[Answer | list[Answer], None]],
    manager: TokenizerManager,
    *args: object,
    **kwargs: object,
) -> AsyncIterator[Answer | list[Answer]]:
    """Yield the answers of a request, and keep their counts for its usage. A hook."""
    async with aclosing(original(manager, *args, **kwargs)) as answers:
        async for answer in answers:
            for one in answer if isinstance(answer, list) else [answer]:
                _keep(one)
            yield answer


@best_effort("usages of predictions", instead=nothing)
def _keep(answer: Answer) -> None:
    meta_info = answer.get("meta_info") or {}
    entries, counts = meta_info.pop(COUNTS, None), _COUNTS.get()
    if entries and entries[-1] is not None and counts is not None:
        counts[meta_info["id"]] = entries[-1]


def verifies_drafts(args: ServerArgs) -> bool:
    """Return whether a server with our worker verifies anything."""
    server = attached(args)
    return isinstance(server, DSparkServer) and server.config.schedule != "off"


FEATURE = Feature(
    __name__,
    is_used=verifies_drafts,
    request_keys=LookupKeys,
    part=PromptLookup.of,
    routes=add_predictions,
)
