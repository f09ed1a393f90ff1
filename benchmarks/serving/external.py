"""A server that somebody else runs: any OpenAI-compatible URL."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from serving.client import Endpoint, ReplyError, flush_cache
from sglang_dspark.errors import ConfigError, DSparkError
from sglang_dspark.tools.http_client import JsonClient

TIMEOUT_S = 60.0


class ExternalServer:
    """Stands beside a launched server in a sweep: it is neither started, suspended nor stopped.

    Attributes:
        endpoint: where prompts are sent; its model is the first one that the server lists.
        can_flush: whether the server empties its prefix cache on request, as SGLang does. Where it cannot, prompts that
            come again in a later round may be served from the cache: pass as many prompts as the sweep asks.
    """

    pid = None

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """Describe the server; it is asked for its model when the ``with`` block is entered."""
        self._client = JsonClient("--url", url, "an OpenAI-compatible", TIMEOUT_S, api_key)
        self.endpoint = Endpoint(url, api_key=api_key)
        self.can_flush = False

    def __enter__(self) -> Self:
        """Ask for the model's name.

        Raises:
            ConfigError: the server does not answer, or no model is listed.
            DSparkError: the server answered with an error.
        """
        url, models = self.endpoint.url, self._client.request("/v1/models").get("data")
        if not models:
            raise ConfigError(
                f"--url {url}: {url}/v1/models lists no model; pass the URL of an OpenAI-compatible server"
            )
        self.endpoint = Endpoint(url, models[0]["id"], self.endpoint.api_key)
        try:
            flush_cache(self.endpoint)
            self.can_flush = True
        except ReplyError:
            self.can_flush = False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave the server as it is."""

    def suspend(self) -> None:
        """Let it run: it is not ours to suspend."""

    def resume(self) -> None:
        """Do nothing: it was never suspended."""

    def get_json(self, path: str) -> dict[str, Any]:
        """Return the decoded JSON answer to ``GET path``; empty where the server has no such route."""
        try:
            return self._client.request(path)
        except DSparkError:
            return {}
