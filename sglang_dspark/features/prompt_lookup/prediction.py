"""OpenAI's field ``prediction`` of a chat: a key of ``speculation`` on the way in, counts of a usage on the way out."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from contextvars import ContextVar

from fastapi import FastAPI
from sglang.srt.plugins.hook_registry import HookType
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sglang_dspark.engine.hooks import hook
from sglang_dspark.engine.http import object_with, read_body, replayed, without_root
from sglang_dspark.engine.requests import ASKED
from sglang_dspark.engine.sglang_types import Answer, TokenizerManager
from sglang_dspark.features.prompt_lookup.options import COUNTS
from sglang_dspark.fence import fenced, nothing

FIELD, ROUTE = "prediction", "/v1/chat/completions"
_DETAILS = "completion_tokens_details"

Counts = dict[str, tuple[int, int]]
"""Predicted tokens accepted and rejected up to now, by the id of each sample."""

_COUNTS: ContextVar[Counts | None] = ContextVar("prediction", default=None)


def add(app: FastAPI, target_only: str | None) -> None:
    """Have SGLang's application read the field; a server whose target decodes alone has nothing to predict for."""
    app.user_middleware.append(Middleware(Predictions))


class Predictions:
    """Serves the field: within the middleware of ``speculation``, whose key it becomes.

    Args:
        app: what it wraps.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or without_root(scope["path"], scope.get("root_path", "")) != ROUTE:
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
    field = None if asked is None else json.loads(asked)
    if field is not None and not isinstance(field, dict):
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

    @fenced("usages of predictions", instead=lambda self, body: body)
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


@fenced("usages of predictions", instead=nothing)
def _keep(answer: Answer) -> None:
    meta_info = answer.get("meta_info") or {}
    entries, counts = meta_info.pop(COUNTS, None), _COUNTS.get()
    if entries and entries[-1] is not None and counts is not None:
        counts[meta_info["id"]] = entries[-1]
