"""Our routes and the ``speculation`` field on SGLang's HTTP server."""

from __future__ import annotations

import json
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse

from sglang_dspark.engine.speculation import carried
from sglang_dspark.speculation import Speculation

FIELD = "speculation"
POLICY_KEY = "dspark_policy"
UNSERVED_ROUTES = (
    # They would change the target and leave the drafter, and the draft K/V of cached prefixes, behind.
    "/update_weights_from_disk",
    "/update_weights_from_distributed",
    "/update_weights_from_tensor",
    "/update_weights_from_ipc",
    "/release_memory_occupation",
)
ROUTES = ("/generate", "/v1/completions", "/v1/chat/completions")


def mount(server_args: Any, *args: Any, **kwargs: Any) -> None:
    """Add our routes and the middleware for the ``speculation`` field to SGLang's application.

    Hooked before the application starts, thus inside SGLang's own API-key middleware.
    """
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.utils.auth import AuthLevel, auth_level

    app.add_api_route("/dspark/stats", _stats, methods=["GET"])
    app.add_api_route("/dspark/policy", auth_level(AuthLevel.ADMIN_OPTIONAL)(_switch_policy), methods=["POST"])
    app.add_middleware(SpeculationMiddleware)


async def _stats(request: Request) -> JSONResponse:
    from sglang.srt.entrypoints.http_server import get_global_state

    states = await get_global_state().tokenizer_manager.get_internal_state()
    return JSONResponse(states[0]["dspark"])


async def _switch_policy(request: Request) -> JSONResponse:
    """``{"policy": "static", "verify_len": 3}``: another verify policy from the next step on."""
    from sglang.srt.entrypoints.http_server import get_global_state
    from sglang.srt.managers.io_struct import SetInternalStateReq

    try:
        fields = json.loads(await request.body())
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        return _bad_request('the body must be a JSON object like {"policy": "auto"}', param="policy")
    manager = get_global_state().tokenizer_manager
    manager.auto_create_handle_loop()
    # SGLang's own channel for changing a running scheduler; hooks.py takes our key out at the other end.
    answers = await manager.set_internal_state_communicator(SetInternalStateReq(server_args={POLICY_KEY: fields}))
    for answer in answers:
        if not answer.updated:
            return _bad_request(answer.server_args[POLICY_KEY], param="policy")
    return JSONResponse(answers[0].server_args[POLICY_KEY])


class SpeculationMiddleware:
    """Moves ``speculation`` of a request body into ``custom_params``, which SGLang carries to the scheduler.

    SGLang ignores unknown body fields silently, so a bad value has to be refused here. Bodies without the field pass
    through untouched.
    """

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"] if scope["type"] == "http" else ""
        if path in UNSERVED_ROUTES:
            message = f"DSPARK does not serve {path} yet; restart the server with the new weights"
            await _bad_request(message, param=None)(scope, receive, send)
            return
        if path not in ROUTES or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        body = await _read_body(receive)
        if body is None:
            return
        try:
            body = _rewrite(body, path)
        except ValueError as error:
            await _bad_request(str(error))(scope, receive, send)
            return
        headers = [(k, v) for k, v in scope["headers"] if k != b"content-length"]
        scope = dict(scope, headers=[*headers, (b"content-length", str(len(body)).encode())])
        await self.app(scope, _replay(body, receive), send)


async def _read_body(receive: Any) -> bytes | None:
    chunks = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        chunks.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(chunks)


def _replay(body: bytes, receive: Any) -> Any:
    pending = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Any:
        return pending.pop() if pending else await receive()

    return replay


def _rewrite(body: bytes, path: str) -> bytes:
    """Body with ``speculation`` moved; the same bytes when it has none.

    Raises:
        ValueError: the field is malformed.
    """
    if FIELD.encode() not in body:
        return body
    try:
        document = json.loads(body)
    except ValueError:
        return body  # not JSON: SGLang's own parser answers
    if not isinstance(document, dict) or FIELD not in document:
        return body
    options = carried(Speculation.parse(document.pop(FIELD)))
    if options:
        carriers = [document]
        if path == "/generate":
            parameters = document["sampling_params"] = document.get("sampling_params") or {}
            carriers = parameters if isinstance(parameters, list) else [parameters]
        for carrier in carriers:
            if not isinstance(carrier, dict) or not isinstance(carrier.get("custom_params") or {}, dict):
                raise ValueError("speculation: sampling_params and custom_params must be objects")
            carrier["custom_params"] = {**(carrier.get("custom_params") or {}), **options}
    return json.dumps(document).encode()


def _bad_request(message: str, param: str | None = FIELD) -> JSONResponse:
    error = {"object": "error", "message": message, "type": "BadRequestError", "param": param, "code": 400}
    return JSONResponse({**error, "error": error}, status_code=400)
