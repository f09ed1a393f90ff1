"""Keeps the names of metrics as they are, whatever release of Prometheus asks for them."""

from __future__ import annotations

import re

from starlette.types import ASGIApp, Receive, Scope, Send

from sglang_dspark.engine.api.http import without_root

_OPENMETRICS = re.compile(rb"(application/openmetrics-text)([^,]*)")


class UnescapedNames:
    """Asks for metrics without escaped names in the name of every client.

    All names of SGLang and DSPARK are valid everywhere. Prometheus before 3.0 does not say how OpenMetrics should
    escape other names, and prometheus_client then replaces every colon by ``_``, which no query expects.

    Args:
        app: the application that it wraps.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._is_of_metrics(scope):
            headers = [(key, _unescaped(value) if key == b"accept" else value) for key, value in scope["headers"]]
            scope = dict(scope, headers=headers)
        await self.app(scope, receive, send)

    def _is_of_metrics(self, scope: Scope) -> bool:
        return without_root(scope["path"], scope.get("root_path", "")).rstrip("/") == "/metrics"


def _unescaped(accept: bytes) -> bytes:
    """Return the header with an escaping, and a version if it names none: the first of two counts."""
    return _OPENMETRICS.sub(rb"\1;escaping=allow-utf-8\2;version=1.0.0", accept)
