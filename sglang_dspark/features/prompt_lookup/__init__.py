"""Prompt lookup: tokens that came before in a text, or that a request names, are drafted where they fit."""

from __future__ import annotations

from sglang_dspark.engine.feature import Feature
from sglang_dspark.engine.server import DSparkServer, attached
from sglang_dspark.engine.sglang_types import ServerArgs
from sglang_dspark.features.prompt_lookup.keys import LookupKeys
from sglang_dspark.features.prompt_lookup.prediction import add
from sglang_dspark.features.prompt_lookup.served import PromptLookup


def verifies_drafts(args: ServerArgs) -> bool:
    """Return whether a server with our worker verifies anything."""
    server = attached(args)
    return isinstance(server, DSparkServer) and server.config.schedule != "off"


FEATURE = Feature(
    __name__,
    is_used=verifies_drafts,
    request_keys=LookupKeys,
    part=PromptLookup.of,
    routes=add,
)
