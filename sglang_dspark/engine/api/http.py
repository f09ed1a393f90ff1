"""Adds to SGLang's HTTP server: the routes, the ``speculation`` field of request bodies, names of metrics."""

from __future__ import annotations

import json
import re
from typing import Any

from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request

from sglang_dspark.engine.api import routes
from sglang_dspark.engine.api.metric_names import UnescapedNames
from sglang_dspark.engine.api.served_requests import is_refused
from sglang_dspark.engine.compat.arguments import attached
from sglang_dspark.engine.launch_state import TargetOnly
from sglang_dspark.engine.sglang_types import ServerArgs
from sglang_dspark.speculation import KEY

FIELD = "speculation"
_MAY_HOLD_FIELD = re.compile(rb"speculation|\\u00[67]|\0")
"""The field as it is, with a letter of it escaped, or in an encoding of several bytes per letter."""
ROUTES = ("/generate", "/v1/completions", "/v1/chat/completions")


def mount(server_args: ServerArgs, *args: Any, **kwargs: Any) -> None:
    """Add our routes, and the middleware for the ``speculation`` field and for metrics, to SGLang's application.

    Hooked before the application starts, thus inside SGLang's own API-key middleware. If the target decodes alone, add
    only the routes: requests are served as without the plugin.
    """
    from sglang.srt.entrypoints.http_server import app

    server = attached(server_args)
    target_only = server.reason if isinstance(server, TargetOnly) else None
    routes.add(app, target_only)
    if target_only is None:
        # Innermost: inside the decompression of bodies, and inside CORS, whose headers belong on our errors too.
        app.user_middleware += [Middleware(SpeculationMiddleware), Middleware(UnescapedNames)]


class SpeculationMiddleware:
    """Moves ``speculation`` of a request body, as JSON text, into ``custom_params``, which SGLang carries on.

    It is checked where SGLang makes the request (:mod:`~sglang_dspark.engine.api.request_field`): SGLang itself ignores
    unknown fields of a body silently. Bodies without the field pass through untouched.

    Args:
        app: what it wraps.
    """

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = routes.without_root(scope["path"], scope.get("root_path", "")) if scope["type"] == "http" else ""
        if scope["type"] == "http" and is_refused(path, scope["method"]):
            message = f"DSPARK does not serve {path} yet; restart the server instead"
            await routes.error_response(400, message, None)(scope, receive, send)
            return
        if path not in ROUTES or scope["method"] not in ("POST", "PUT"):
            await self.app(scope, receive, send)
            return
        try:
            body = _moved(await Request(scope, receive).body(), path)
        except ClientDisconnect:
            return
        headers = [(k, v) for k, v in scope["headers"] if k != b"content-length"]
        scope = dict(scope, headers=[*headers, (b"content-length", str(len(body)).encode())])
        await self.app(scope, _replay(body, receive), send)


def _replay(body: bytes, receive: Any) -> Any:
    pending = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Any:
        return pending.pop() if pending else await receive()

    return replay


def _moved(body: bytes, path: str) -> bytes:
    """Return the body with ``speculation`` moved; the same bytes if it has none, or cannot be read."""
    if not _MAY_HOLD_FIELD.search(body):
        return body
    try:
        document = json.loads(body)
        if not isinstance(document, dict) or FIELD not in document:
            return body
        text = json.dumps(document.pop(FIELD))
        carriers = [document]
        if path == "/generate":
            if document.get("sampling_params") is None:
                document["sampling_params"] = {}
            parameters = document["sampling_params"]
            carriers = parameters if isinstance(parameters, list) else [parameters]
        for carrier in carriers:
            _put(carrier, text)
        return json.dumps(document).encode()
    except (ValueError, RecursionError):
        return body  # not JSON, or nested too deeply: SGLang's own parser answers, which has less room still


def _put(carrier: Any, text: str) -> None:
    """Add the field to the ``custom_params`` of ``carrier``. What is no object is refused as such later on."""
    if isinstance(carrier, dict):
        custom_params = carrier.get("custom_params")
        if custom_params is None or isinstance(custom_params, dict):
            carrier["custom_params"] = {**(custom_params or {}), KEY: text}
