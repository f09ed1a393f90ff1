"""Requests to a server of one's own: no proxy, JSON both ways, errors that say what to do."""

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from sglang_dspark.errors import ConfigError, DSparkError

open_directly = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
"""``urlopen`` past any proxy: one set for the outside world must not see requests to 127.0.0.1."""


@dataclass(frozen=True)
class JsonClient:
    """A server that a command line option names.

    Attributes:
        option: that option, for error messages.
        url: base URL, without a trailing slash.
        kind: what should be running there, for error messages.
        timeout_s: longest time for one answer.
        api_key: the server's ``--api-key``; None where it has none.
    """

    option: str
    url: str
    kind: str
    timeout_s: float
    api_key: str | None = None

    def request(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the answer to ``GET path``, or to ``POST path`` with a body.

        Raises:
            ConfigError: the server does not answer, or not with JSON.
            DSparkError: the server answered with an error.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        if self.api_key is not None:
            # Not for whomever the server may redirect to.
            request.add_unredirected_header("Authorization", f"Bearer {self.api_key}")
        try:
            with open_directly(request, timeout=self.timeout_s) as response:
                answer: dict[str, Any] = json.load(response)
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")[:500]
            raise DSparkError(f"{self.url}{path}: HTTP {error.code}: {text}") from error
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{self.option} {self.url}: {error}; check that {self.kind} server is running there"
            ) from error
        return answer
