"""Keys of the field ``speculation`` by which a request says how soon its tokens have to come."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Self

from msgspec import Meta

from sglang_dspark.engine.feature import RequestKeys
from sglang_dspark.engine.request_options import asked_for, kept_by_request
from sglang_dspark.engine.server import DSparkServer, OtherServer, speculating
from sglang_dspark.engine.sglang_types import Req, TokenizerManager
from sglang_dspark.fence import fenced


class PromiseKeys(RequestKeys, frozen=True, omit_defaults=True):
    """Say how fast a request wants to be.

    Attributes:
        tpot_ms: milliseconds per token behind the first one, over the whole answer; None takes the server's.
        ttft_ms: milliseconds from its arrival in the scheduler to the first token; None takes the server's.
        weight: what its drafts count beside those of others.
    """

    tpot_ms: Annotated[float, Meta(ge=0.1, le=10_000, description="must be a number from 0.1 to 10000")] | None = None
    ttft_ms: Annotated[float, Meta(ge=0.1, le=600_000, description="must be a number from 0.1 to 600000")] | None = None
    weight: Annotated[float, Meta(ge=0.01, le=1, description="must be a number from 0.01 to 1")] = 1.0

    @classmethod
    def unserved(cls, server: DSparkServer | OtherServer) -> Collection[str]:
        return () if isinstance(server, DSparkServer) else tuple(cls.key_types())

    def for_scheduler(self, given: Collection[str], manager: TokenizerManager) -> Self:
        server = speculating(manager.server_args)
        assert server is not None, "requests of other servers are not checked"
        for key in (key for key in self.unserved(server) if key in given):
            raise ValueError(
                f"speculation.{key}={getattr(self, key):g} is not served by SGLang's own worker; drop the key, or "
                "start the server with --speculative-dspark-engine plugin if that serves the target"
            )
        return self


@fenced("promises", instead=lambda req, server: server)
@kept_by_request
def promised(req: Req, server: PromiseKeys) -> PromiseKeys:
    """Return what a request of a scheduler asks for, or what the server promises where the request names nothing."""
    asked = asked_for(req, "promises", PromiseKeys)
    return PromiseKeys(asked.tpot_ms or server.tpot_ms, asked.ttft_ms or server.ttft_ms, asked.weight)
