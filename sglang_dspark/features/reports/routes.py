"""``/dspark`` and the routes below it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from sglang.srt.plugins.hook_registry import HookType

from sglang_dspark.declared import Scalar
from sglang_dspark.engine.hooks import Moment, hook
from sglang_dspark.engine.http import error_response, flat_object, without_root
from sglang_dspark.engine.sglang_types import ServerArgs, TokenizerManager
from sglang_dspark.engine.support import versions
from sglang_dspark.errors import BusyError, ConfigError
from sglang_dspark.features.reports import page
from sglang_dspark.features.reports.answers import A, Json, Report, StatsAnswer, added, capabilities, stats, switched
from sglang_dspark.features.reports.channel import Channel
from sglang_dspark.fence import FAILURES

if TYPE_CHECKING:
    from sglang.srt.utils.auth import AuthDecision

PAGE = "/dspark"


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
    routes = Routes()
    app.add_api_route("/dspark/stats", routes.stats, methods=["GET"])
    app.add_api_route("/dspark/capabilities", routes.capabilities, methods=["GET"])

    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def policy(request: Request) -> Response:
        return await routes.policy(request)

    app.add_api_route("/dspark/policy", policy, methods=["POST"])


class Routes:
    """Serve the routes of a server that decodes with DSPARK; the schedulers answer."""

    def __init__(self) -> None:
        self._channel = Channel(tokenizer_manager)

    async def stats(self) -> Response:
        """Return the figures since the start and of the last minute."""
        return await self._respond("stats", {}, _stats_with_failures_here)

    async def capabilities(self) -> Response:
        """Return the decode path of this server, and the reason for it."""
        return await self._respond("capabilities", {}, capabilities)

    async def policy(self, request: Request) -> Response:
        """Switch to another verify policy from the next step on: ``{"policy": "static", "verify_len": 3}``."""
        fields = await flat_object(request, "policy", '{"policy": "auto"}')
        if isinstance(fields, JSONResponse):
            return fields
        return await self._respond("policy", fields, switched)

    async def _respond(self, question: str, fields: dict[str, Scalar], report: Report[A]) -> Response:
        """Return the JSON that ``report`` makes of the schedulers' answers, or the reason why there is none.

        JSON does not know NaN: such a figure is null.
        """
        try:
            answers = await self._channel.ask(question, fields)
        except ConfigError as error:
            return error_response(400, str(error), question)
        except BusyError as error:
            return error_response(503, str(error), question)
        return Response(msgspec.json.encode(report(answers), enc_hook=_plain_number), media_type="application/json")


def _stats_with_failures_here(answers: Sequence[StatsAnswer]) -> Json:
    """Return the statistics of the schedulers with what has failed in this process, too."""
    failed = added([*(answer["counted"]["failed_advice"] for answer in answers), FAILURES])
    return stats(answers) | {"failed_advice": failed}


def _plain_number(value: object) -> object:
    """Return a number of numpy's as Python's."""
    if not isinstance(value, np.generic):
        raise TypeError(f"{type(value).__name__} is no JSON")
    return value.item()


async def _page() -> HTMLResponse:
    document, policy = page.document(needs_key=bool(_server_args().api_key))
    return HTMLResponse(document, headers={"Content-Security-Policy": policy, "Cache-Control": "no-cache"})


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
