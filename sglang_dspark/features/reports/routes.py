"""``/dspark`` and the routes below it."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from sglang.srt.plugins.hook_registry import HookType

from sglang_dspark.declared import Scalar
from sglang_dspark.engine.hooks import Moment, hook
from sglang_dspark.engine.http import TURNS, error_response, flat_object, without_root
from sglang_dspark.engine.sglang_types import ServerArgs, TokenizerManager
from sglang_dspark.engine.support import versions
from sglang_dspark.errors import BusyError, ConfigError
from sglang_dspark.features.reports import document
from sglang_dspark.features.reports.channel import Channel
from sglang_dspark.features.reports.document import Json, StatsAnswer, added, in_common, with_each
from sglang_dspark.fence import FAILURES

if TYPE_CHECKING:
    from sglang.srt.utils.auth import AuthDecision

PAGE = "/dspark"
Document = Callable[[Sequence[Any]], Json]
"""Makes JSON of the answers of all schedulers."""


def add(app: FastAPI, target_only: str | None) -> None:
    """Add our routes to SGLang's application.

    Args:
        target_only: why the target decodes alone, which is all that there is to say then; None if it does not.
    """
    from sglang.srt.utils.auth import AuthLevel, auth_level

    app.add_api_route(PAGE, _page, methods=["GET"], include_in_schema=False)
    if target_only is not None:
        alone = {"effective_decode_path": "target-only", "reason": target_only, "versions": versions(), "policies": {}}
        app.add_api_route("/dspark/capabilities", lambda: alone, methods=["GET"], name="capabilities")
        return
    channel = Channel(tokenizer_manager, TURNS)

    async def answered(question: str, make: Document, fields: dict[str, Scalar] | None = None) -> Response:
        try:
            answers = await channel.ask(question, fields or {})
        except ConfigError as error:
            return error_response(400, str(error), question)
        except BusyError as error:
            return error_response(503, str(error), question)
        # JSON does not know NaN: such a figure is null.
        return Response(msgspec.json.encode(make(answers), enc_hook=_plain_number), media_type="application/json")

    async def stats() -> Response:
        return await answered("stats", _stats)

    async def capabilities() -> Response:
        return await answered("capabilities", partial(with_each, in_common))

    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def policy(request: Request) -> Response:
        fields = await flat_object(request, "policy", '{"policy": "auto"}')
        if isinstance(fields, JSONResponse):
            return fields
        return await answered("policy", partial(with_each, in_common), fields)

    app.add_api_route("/dspark/stats", stats, methods=["GET"])
    app.add_api_route("/dspark/capabilities", capabilities, methods=["GET"])
    app.add_api_route("/dspark/policy", policy, methods=["POST"])


def _stats(answers: Sequence[StatsAnswer]) -> Json:
    """Return the statistics of the schedulers with what has failed in this process, too."""
    failed = added([*(answer["counted"]["failed_advice"] for answer in answers), FAILURES])
    return with_each(document.stats, answers) | {"failed_advice": failed}


def _plain_number(value: object) -> object:
    """Return a number of numpy's as Python's."""
    if not isinstance(value, np.generic):
        raise TypeError(f"{type(value).__name__} is no JSON")
    return value.item()


async def _page() -> HTMLResponse:
    page, policy = page_document(needs_key=bool(_server_args().api_key))
    return HTMLResponse(page, headers={"Content-Security-Policy": policy, "Cache-Control": "no-cache"})


@cache
def page_document(needs_key: bool) -> tuple[str, str]:
    """Return the live page, and the ``Content-Security-Policy`` to serve it with.

    The page needs nothing from anywhere else. The policy lets it talk only to its own server, and run no other script.

    Args:
        needs_key: whether the server answers only with an API key: the page then asks for it first.
    """
    folder = files(__package__) / "page"
    html, style, script = ((folder / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", "page.js"))
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script))
    filled = html.replace("{{needs_key}}", "yes" if needs_key else "no")
    policy = (
        "default-src 'none'; connect-src 'self'; img-src data:; style-src 'sha256-{}'; script-src 'sha256-{}'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
    )
    return filled.replace("{{style}}", style).replace("{{script}}", script), policy.format(*digests)


def tokenizer_manager() -> TokenizerManager:
    """Return SGLang's own, which talks to the scheduler."""
    from sglang.srt.entrypoints.http_server import get_global_state

    manager: TokenizerManager = get_global_state().tokenizer_manager
    return manager


def _server_args() -> ServerArgs:
    return tokenizer_manager().server_args


@hook(
    "sglang.srt.utils.auth.decide_request_auth",
    HookType.AFTER,
    where="routes",
    reason="a browser has to load the page at /dspark before it can ask for the API key",
    by=Moment.SOME_TIME,
)
def page_needs_no_key(decision: object, *, method: str, path: str, **credentials: object) -> AuthDecision | None:
    """Hook after SGLang's decision on a request: the page, which holds no data and asks for the key, is free.

    A browser cannot be told to send a header with the address that somebody types.
    """
    from sglang.srt.utils.auth import AuthDecision

    is_page = method == "GET" and path.endswith(PAGE) and without_root(path, _server_args().fastapi_root_path) == PAGE
    return AuthDecision(allowed=True) if is_page else None
