"""Adds to SGLang's HTTP server: the routes of features, the ``speculation`` field of request bodies.

With several tokenizer workers (``--tokenizer-worker-num``) uvicorn starts processes that import an application by its
path: :data:`app` of this module. SGLang loads no plugins there.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import Awaitable, Callable
from functools import cache
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from sglang.srt.environ import envs
from sglang.srt.managers.multi_tokenizer_mixin import get_main_process_id, read_from_shared_memory
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookType
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.supervisors import Multiprocess

from sglang_dspark.declared import Scalar
from sglang_dspark.engine import hooks
from sglang_dspark.engine.feature import all_features
from sglang_dspark.engine.hooks import Moment, hook
from sglang_dspark.engine.requests import ASKED
from sglang_dspark.engine.server import TargetOnly, attached, speculating
from sglang_dspark.engine.sglang_types import ServerArgs, TokenizerManager
from sglang_dspark.errors import BusyError

FIELD = "speculation"
HEADER = "X-Request-Id-Speculation"
"""Says the same as JSON text. SGLang's router drops fields that it does not know, and headers that begin otherwise."""
MAX_ORDER_BYTES = 4096
"""Bytes of an operator's request in JSON."""
ANSWER_LIMIT_S = 10.0
"""Longest time that a caller of a route waits. A scheduler that computes a long prefill answers after it."""
PAUSE_S = 0.02
"""Shortest time between two calls: many callers cost the scheduler no more than one."""
MAX_WAITING = 16
T = TypeVar("T")
APP_OF_WORKERS = "sglang_dspark.engine.http:app"
# Two would give the server another part to play. The last one sets what other speculative algorithms read.
REFUSED_ROUTES = ("/pd_role_switch", "/scale_elastic_ep", "/set_internal_state")
REFUSED_CHANGES = ("/hicache/storage-backend",)
"""Routes that are only read: other methods than GET would move K/V beyond the host's memory, and the draft K/V not."""
ROUTES = ("/generate", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")


@hook(
    "sglang.srt.entrypoints.http_server._setup_and_run_http_server",
    HookType.BEFORE,
    where="routes",
    reason="SGLang has no plugin interface for routes and middleware",
    by=Moment.SOME_TIME,
)
def mount(server_args: ServerArgs, *args: object, **kwargs: object) -> None:
    """Have SGLang's application carry ours in the process that serves it, or in each of several.

    Hooked before the application starts, thus inside SGLang's own API-key middleware.
    """
    if server_args.tokenizer_worker_num > 1:
        envs.SGLANG_HTTP_SERVER_APP_PATH.set(APP_OF_WORKERS)
        # SGLang's handler ends the server when one of its processes says that it has failed. uvicorn's supervisor of
        # several workers would take its place, and do nothing: requests would hang.
        if callable(end := signal.getsignal(signal.SIGQUIT)):
            Multiprocess.handle_quit = lambda supervisor: end(signal.SIGQUIT, None)  # type: ignore[attr-defined]
    else:
        from sglang.srt.entrypoints.http_server import app

        add_to(app, server_args)


def add_to(app: FastAPI, server_args: ServerArgs) -> None:
    """Add the routes of features, and the middleware for the ``speculation`` field, to SGLang's application.

    If the target decodes without drafts, add only routes: requests are served as without the plugin.
    """
    server = attached(server_args)
    target_only = server.reason if isinstance(server, TargetOnly) else None
    if target_only is None:
        # Inside the decompression of bodies, and inside CORS, whose headers belong on our errors too.
        app.user_middleware.append(Middleware(SpeculationMiddleware))
    for feature in all_features():
        if feature.is_used(server_args):
            feature.routes(app, target_only)


def without_root(path: str, root_path: str) -> str:
    """Return the path that routes are found by, as Starlette sees it.

    Behind a proxy (``--fastapi-root-path``) uvicorn puts the proxy's prefix before every path, as it is.
    """
    rest = path.removeprefix(root_path)
    return rest if rest.startswith("/") else path


def error_response(status: int, message: str, param: str | None) -> JSONResponse:
    """Return an error in the form of SGLang's and OpenAI's at once."""
    kind = HTTPStatus(status).phrase.replace(" ", "") + "Error"
    error = {"object": "error", "message": message, "type": kind, "param": param, "code": status}
    return JSONResponse({**error, "error": error}, status_code=status)


async def flat_object(request: Request, param: str, example: str) -> dict[str, Scalar] | JSONResponse:
    """Return what an operator's request holds, or the error that answers it, with an example of a body."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        return error_response(415, "the request needs the header Content-Type: application/json", "Content-Type")
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_ORDER_BYTES:
            break
    try:
        fields = json.loads(body) if len(body) <= MAX_ORDER_BYTES else None
        json.dumps(fields, ensure_ascii=False).encode()  # fails for half of a letter, which JSON may have as an escape
    except (ValueError, RecursionError):
        fields = None
    if isinstance(fields, dict) and not any(isinstance(value, dict | list) for value in fields.values()):
        return fields
    message = f"the body must be a flat JSON object of at most {MAX_ORDER_BYTES} bytes in UTF-8 like {example}"
    return error_response(400, message, param)


def tokenizer_manager() -> TokenizerManager:
    """Return SGLang's own, which talks to the scheduler."""
    from sglang.srt.entrypoints.http_server import get_global_state

    manager: TokenizerManager = get_global_state().tokenizer_manager
    return manager


class Turns:
    """Has calls to the schedulers wait for each other: one at a time, so many, each caller so long.

    A call that was begun keeps its turn until it ends, whether its caller still waits or not.

    Args:
        limit_s: longest time that a caller waits.
    """

    def __init__(self, limit_s: float = ANSWER_LIMIT_S) -> None:
        self.limit_s = limit_s
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._last = float("-inf")

    def begin(self, call: Callable[[], Awaitable[T]]) -> asyncio.Task[T]:
        """Return a call that is made once its turn comes.

        Raises:
            BusyError: too many wait already.
        """
        if len(self._tasks) >= MAX_WAITING:
            raise BusyError(f"{len(self._tasks)} calls already wait for the scheduler; try again later")
        task = asyncio.create_task(self._in_turn(call))
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    async def result(self, task: asyncio.Task[T]) -> T:
        """Return what a call returns, for which several callers may wait.

        Raises:
            BusyError: it has not ended in time.
        """
        try:
            return await asyncio.wait_for(asyncio.shield(task), self.limit_s)
        except TimeoutError:
            raise BusyError(
                f"the scheduler has not answered for {self.limit_s:g} s; it may be in a long step or loading weights, "
                "and what was asked for may still take effect: check again later"
            ) from None

    async def _in_turn(self, call: Callable[[], Awaitable[T]]) -> T:
        clock = asyncio.get_running_loop().time
        async with self._lock:
            await asyncio.sleep(self._last + PAUSE_S - clock())
            self._last = clock()
            return await call()

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # its caller may be gone, and nothing else looks at it


TURNS = Turns()
"""Of all routes of this process."""


class SpeculationMiddleware:
    """Keeps ``speculation`` of a request's body, or of a header, for the requests that SGLang makes of it.

    SGLang ignores unknown fields of a body silently, and some of its routes make a body of another route out of theirs.
    The field is checked where SGLang makes the request (:mod:`~sglang_dspark.engine.requests`).
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = without_root(scope["path"], scope.get("root_path", "")) if scope["type"] == "http" else ""
        if path in REFUSED_ROUTES or (path in REFUSED_CHANGES and scope["method"] != "GET"):
            message = f"DSPARK does not serve {path} yet; restart the server instead"
            await error_response(400, message, None)(scope, receive, send)
            return
        if path not in ROUTES or scope["method"] not in ("POST", "PUT"):
            await self.app(scope, receive, send)
            return
        body = await read_body(scope, receive)
        if body is None:
            return
        # Tasks that this request starts see it, too; those of other requests do not.
        before = ASKED.set(_field_of(body) or _header_of(scope))
        try:
            await self.app(scope, replayed(body, receive), send)
        finally:
            ASKED.reset(before)


async def read_body(scope: Scope, receive: Receive) -> bytes | None:
    """Return the body of a request; None if its client has gone."""
    try:
        return await Request(scope, receive).body()
    except ClientDisconnect:
        return None


def replayed(body: bytes, receive: Receive) -> Receive:
    """Return what gives an application a body that was read, and then what ``receive`` gives."""
    pending = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay


def _field_of(body: bytes) -> str | None:
    """Return the field as JSON text; None if the body has none, or cannot be read."""
    document = object_with(body, FIELD)
    try:
        return None if document is None else json.dumps(document[FIELD])
    except RecursionError:
        return None


def _header_of(scope: Scope) -> str | None:
    """Return the header; None if the request has none. Some clients write headers in UTF-8, some in Latin-1."""
    text = Headers(scope=scope).get(HEADER)
    if text is None:
        return None
    try:
        return text.encode("latin-1").decode()
    except UnicodeDecodeError:
        return text


def object_with(body: bytes, field: str) -> dict[str, object] | None:
    """Return the JSON object of a body; None if it has no such field, or cannot be read."""
    # The field as it is, with a letter of it escaped, or in an encoding of several bytes per letter.
    if not re.search(rb"%s|\\u00[67]|\0" % field.encode(), body):
        return None
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return None  # not JSON, or nested too deeply: SGLang's own parser answers, which has less room still
    return document if isinstance(document, dict) and field in document else None


def __getattr__(name: str) -> FastAPI:
    if name == "app":
        return _application()
    raise AttributeError(name)


@cache
def _application() -> FastAPI:
    """Return SGLang's application with ours in it. SGLang's first process has left its arguments in shared memory."""
    load_plugins()
    from sglang.srt.entrypoints.http_server import app

    _ports, args, _scheduler = read_from_shared_memory(f"multi_tokenizer_args_{get_main_process_id()}")
    hooks.install(args, "routes", *(() if speculating(args) is None else ("front_end",)))
    add_to(app, args)
    return app
