"""Keys of the field ``speculation`` by which a request says how soon its tokens have to come."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta, Struct

from sglang_dspark.declared import field_types
from sglang_dspark.engine.compat.arguments import speculating
from sglang_dspark.engine.feature import RequestKeys
from sglang_dspark.engine.launch_state import DSparkServer, OtherServer
from sglang_dspark.engine.sglang_types import TokenizerManager


class SloOptions(Struct, frozen=True, omit_defaults=True):
    """Checked options of a request; the attributes are those of :class:`SloKeys`."""

    tpot_ms: float | None = None
    weight: float = 1.0


@dataclass(frozen=True)
class SloKeys(RequestKeys):
    """Say how fast a request wants to be.

    Attributes:
        tpot_ms: milliseconds per token after the first one, over the whole answer; None takes the server's.
        weight: what its drafts count next to those of others.
    """

    tpot_ms: Annotated[float, Meta(ge=0.1, le=10_000, description="must be a number from 0.1 to 10000")] | None = None
    weight: Annotated[float, Meta(ge=0.01, le=1, description="must be a number from 0.01 to 1")] = 1.0

    @classmethod
    def unserved(cls, server: DSparkServer | OtherServer) -> Collection[str]:
        return () if isinstance(server, DSparkServer) else tuple(field_types(cls))

    def for_scheduler(self, given: Collection[str], manager: TokenizerManager) -> SloOptions | None:
        server = speculating(manager.server_args)
        assert server is not None, "requests of other servers are not checked"
        for key in (key for key in self.unserved(server) if key in given):
            raise ValueError(
                f"speculation.{key}={getattr(self, key):g} is not served by SGLang's own worker; drop the key, or "
                "start the server with --speculative-dspark-engine plugin if that serves the target"
            )
        options = SloOptions(self.tpot_ms, self.weight)
        return None if options == SloOptions() else options
