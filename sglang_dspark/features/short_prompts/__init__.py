"""Short prompts: their tokens are verified like drafts, by the CUDA graphs of decode steps, in place of a prefill."""

from __future__ import annotations

from sglang_dspark.engine.feature import Feature
from sglang_dspark.engine.server import DSparkServer, attached
from sglang_dspark.engine.sglang_types import ServerArgs


def verifies_prompts(args: ServerArgs) -> bool:
    """Return whether the operator has not turned it off; a CPU has to be asked, where it is slower."""
    server = attached(args)
    if not isinstance(server, DSparkServer):
        return False
    rows = server.config.prompt_rows
    return rows != 0 and (rows is not None or args.device != "cpu")


FEATURE = Feature(
    __name__,
    is_used=verifies_prompts,
    hooks={"scheduler": ("riding",)},
    part="served.ShortPrompts.of",
)
