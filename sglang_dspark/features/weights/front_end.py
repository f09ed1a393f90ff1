"""Updates in the process that serves HTTP: the route for a new drafter, and two hooks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from sglang.srt.plugins.hook_registry import HookType

from sglang_dspark.engine.hooks import Moment, hook
from sglang_dspark.engine.http import TURNS, error_response, flat_object
from sglang_dspark.errors import BusyError
from sglang_dspark.features.weights.served import DRAFTER

ROUTE = "/dspark/drafter"
_EXAMPLE = '{"path": "/models/drafter"}'
_lock = asyncio.Lock()


@hook(
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._wait_for_model_update_from_disk",
    HookType.AROUND,
    where="front_end",
    reason="the answer to a second update would end the process that waits for the first",
    by=Moment.SOME_TIME,
)
async def one_at_a_time(original: Callable[..., Awaitable[Any]], manager: Any, request: Any) -> Any:
    """Have checkpoints that are to be loaded wait for each other."""
    async with _lock:
        return await original(manager, request)


@hook(
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._update_model_path_info",
    HookType.AROUND,
    where="front_end",
    reason="a new drafter is loaded as a new target is, and the target's name stays",
    by=Moment.SOME_TIME,
)
def keep_path(original: Callable[..., None], manager: Any, model_path: str, load_format: str) -> None:
    """Note the path of a new target, and leave that of a drafter to the scheduler."""
    if load_format != DRAFTER:
        original(manager, model_path, load_format)


def add_route(app: Any, target_only: str | None) -> None:
    """Add the route to SGLang's application, if there is a drafter to replace."""
    from sglang.srt.utils.auth import AuthLevel, auth_level

    if target_only is None:
        app.add_api_route(ROUTE, auth_level(AuthLevel.ADMIN_OPTIONAL)(replace_drafter), methods=["POST"])


async def replace_drafter(request: Request) -> Response:
    """Load another drafter between two steps, beside running requests: ``{"path": "/models/drafter"}``."""
    from sglang.srt.entrypoints.http_server import get_global_state
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

    fields = await flat_object(request, "path", _EXAMPLE)
    if isinstance(fields, JSONResponse):
        return fields
    path = fields.get("path")
    if not isinstance(path, str) or len(fields) > 1:
        return error_response(400, f"the body must be like {_EXAMPLE}, not {fields}", "path")
    manager = get_global_state().tokenizer_manager
    manager.auto_create_handle_loop()
    asked = UpdateWeightFromDiskReqInput(model_path=path, load_format=DRAFTER)
    try:
        load = TURNS.begin(partial(manager._wait_for_model_update_from_disk, asked))
        success, message, _paused = await TURNS.result(load)
    except BusyError as error:
        return error_response(503, str(error), "path")
    return JSONResponse({"success": True, "message": message}) if success else error_response(400, message, "path")
