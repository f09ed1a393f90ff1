"""Keys of the field ``speculation`` by which a request says how soon its tokens have to come; the answer to them."""

from __future__ import annotations

from collections.abc import Collection
from math import inf
from typing import Annotated, Any, Self

from msgspec import Meta
from sglang.srt.plugins.hook_registry import HookType

from sglang_dspark.config import flag_name
from sglang_dspark.engine.feature import RequestKeys
from sglang_dspark.engine.hooks import Moment, hook
from sglang_dspark.engine.server import DSparkServer, OtherServer, speculating
from sglang_dspark.engine.sglang_types import TokenizerManager
from sglang_dspark.fence import fenced, nothing

TOLD = "dspark_slo"
"""Of SGLang's ``customized_info``, and of ``meta_info``: what became of the SLO."""


class SloKeys(RequestKeys, frozen=True, omit_defaults=True):
    """Say how fast a request wants to be.

    Attributes:
        tpot_ms: milliseconds per token after the first one, over the whole answer; None takes the server's.
        weight: what its drafts count next to those of others.
    """

    tpot_ms: Annotated[float, Meta(ge=0.1, le=10_000, description="must be a number from 0.1 to 10000")] | None = None
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
        least_ms = server.config.min_tpot_ms
        if self.tpot_ms is not None and self.tpot_ms < least_ms:
            remedy = "drop the key" if least_ms == inf else "name that or more, or drop the key"
            raise ValueError(
                f"speculation.tpot_ms={self.tpot_ms:g} is less than requests may name on this server, "
                f"{flag_name('min_tpot_ms')}={least_ms:g}; {remedy}"
            )
        return self


@hook(
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.update_request_meta_info",
    HookType.AFTER,
    where="front_end",
    reason="SGLang has a place for what a scheduler says of each token, and none for what it says of an answer",
    by=Moment.SOME_TIME,
)
@fenced("SLOs", instead=nothing)
def tell_once(result: None, manager: TokenizerManager, meta_info: dict[str, Any], state: Any, *args: object) -> None:
    """Leave only what became of an SLO in ``meta_info``, without a null for every token before it."""
    if entries := state.customized_info_accumulated.pop(TOLD, None):
        del meta_info[TOLD]
        if entries[-1] is not None:
            meta_info[TOLD] = entries[-1]
