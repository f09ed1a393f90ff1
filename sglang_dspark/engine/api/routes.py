"""``/dspark`` and the routes below it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import numpy as np
from fastapi import Request, Response
from fastapi.responses import HTMLResponse, JSONResponse

from sglang_dspark import dashboard
from sglang_dspark.engine.api.channel import Channel
from sglang_dspark.engine.support import versions
from sglang_dspark.errors import BusyError, ConfigError
from sglang_dspark.metrics.history import HISTORY_S, Snapshot, full_report

PAGE = "/dspark"
LONGEST_POLICY = 4096
"""Bytes of a policy in JSON."""
_KINDS = {
    400: "BadRequestError",
    404: "NotFoundError",
    415: "UnsupportedMediaTypeError",
    503: "ServiceUnavailableError",
}


def add(app: Any, target_only: str | None) -> None:
    """Add our routes to SGLang's application.

    Args:
        target_only: why the target decodes alone, where it does.
    """
    from sglang.srt.utils.auth import AuthLevel, auth_level

    routes = TargetOnlyRoutes(target_only) if target_only is not None else Routes()
    app.add_api_route(PAGE, _page, methods=["GET"], include_in_schema=False)
    app.add_api_route("/dspark/stats", routes.stats, methods=["GET"])
    app.add_api_route("/dspark/capabilities", routes.capabilities, methods=["GET"])

    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def policy(request: Request) -> Response:
        return await routes.policy(request)

    app.add_api_route("/dspark/policy", policy, methods=["POST"])


def without_root(path: str, root_path: str) -> str:
    """The path that routes are found by, as Starlette sees it.

    Behind a proxy (``--fastapi-root-path``) uvicorn puts the proxy's prefix before every path, as it is.
    """
    rest = path.removeprefix(root_path)
    return rest if rest.startswith("/") else path


class Routes:
    """Routes of a server that decodes with DSPARK; the scheduler answers."""

    def __init__(self) -> None:
        self._channel = Channel(tokenizer_manager)

    async def stats(self, history_s: int = 0) -> Response:
        """Figures since the start and of the last minute; ``history_s``: seconds to list one by one."""
        if not 0 <= history_s <= HISTORY_S:
            return error_response(400, f"history_s={history_s} must lie between 0 and {HISTORY_S}", "history_s")
        # All that is kept or nothing: readers with other spans share one question.
        answer = await self._ask("stats", {"history_s": HISTORY_S if history_s else 0})
        if isinstance(answer, JSONResponse):
            return answer
        return await asyncio.to_thread(_stats, answer, history_s)

    async def capabilities(self) -> Response:
        """What decodes on this server, and why."""
        return _in_json(await self._ask("capabilities", {}))

    async def policy(self, request: Request) -> Response:
        """``{"policy": "static", "verify_len": 3}``: another verify policy from the next step on."""
        if _media_type(request) != "application/json":
            return error_response(415, "the header must say Content-Type: application/json", "Content-Type")
        try:
            fields = json.loads(await _short_body(request))
        except (ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict) or any(isinstance(value, dict | list) for value in fields.values()):
            return error_response(
                400,
                f'the body must be a flat JSON object of at most {LONGEST_POLICY} bytes like {{"policy": "auto"}}',
                "policy",
            )
        return _in_json(await self._ask("policy", fields))

    async def _ask(self, question: str, fields: dict[str, Any]) -> Any:
        """The scheduler's answer, or the response that says why there is none."""
        try:
            return await self._channel.ask(question, fields)
        except ConfigError as error:
            return error_response(400, str(error), question)
        except BusyError as error:
            return error_response(503, str(error), question)


def _stats(answer: dict[str, Any], history_s: int) -> Response:
    report = full_report(answer["known"], Snapshot.unpacked(answer["snapshot"]), with_history=history_s > 0)
    if history_s:
        report["history"] = report["history"][-history_s:]
    return _in_json(report)


def _in_json(answer: Any) -> Response:
    """An answer as JSON, which does not know NaN: such a figure is null, and the others can be read."""
    if isinstance(answer, JSONResponse):
        return answer
    return Response(msgspec.json.encode(answer, enc_hook=_plain_number), media_type="application/json")


def _plain_number(value: Any) -> Any:
    """A number of numpy's as Python's."""
    if not isinstance(value, np.generic):
        raise TypeError(f"{type(value).__name__} is no JSON")
    return value.item()


def _media_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def _short_body(request: Request) -> bytes:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > LONGEST_POLICY:
            raise ValueError("too long")
    return body


class TargetOnlyRoutes:
    """Routes of a server on which the target decodes alone."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    async def stats(self) -> JSONResponse:
        """There are none."""
        return self._nothing()

    async def capabilities(self) -> JSONResponse:
        """What decodes on this server, and why."""
        return JSONResponse(
            {"effective_decode_path": "target-only", "reason": self._reason, "versions": versions(), "policies": {}}
        )

    async def policy(self, request: Request) -> JSONResponse:
        """None can be had."""
        return self._nothing()

    def _nothing(self) -> JSONResponse:
        return error_response(404, f"this server decodes with the target alone: {self._reason}", None)


async def _page() -> HTMLResponse:
    page, policy = dashboard.page(needs_key=bool(_server_args().api_key))
    return HTMLResponse(page, headers={"Content-Security-Policy": policy, "Cache-Control": "no-cache"})


def tokenizer_manager() -> Any:
    """SGLang's own, which talks to the scheduler."""
    from sglang.srt.entrypoints.http_server import get_global_state

    return get_global_state().tokenizer_manager


def _server_args() -> Any:
    return tokenizer_manager().server_args


def error_response(status: int, message: str, param: str | None) -> JSONResponse:
    """An error in the form of SGLang's and OpenAI's at once."""
    error = {"object": "error", "message": message, "type": _KINDS[status], "param": param, "code": status}
    return JSONResponse({**error, "error": error}, status_code=status)


def page_needs_no_key(decision: Any, *, method: str, path: str, **credentials: Any) -> Any:
    """Hook after SGLang's decision on a request: the page, which holds no data and asks for the key, is free.

    A browser cannot be told to send a header with the address that somebody types.
    """
    from sglang.srt.utils.auth import AuthDecision

    is_page = method == "GET" and path.endswith(PAGE) and without_root(path, _server_args().fastapi_root_path) == PAGE
    return AuthDecision(allowed=True) if is_page else None
