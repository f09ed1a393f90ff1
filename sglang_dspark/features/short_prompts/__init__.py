"""Short prompts: their tokens are verified like drafts, by the CUDA graphs of decode steps, in place of a prefill."""

from __future__ import annotations

from sglang_dspark.engine.feature import Feature
from sglang_dspark.engine.server import DSparkServer, attached
from sglang_dspark.engine.sglang_types import ServerArgs
from sglang_dspark.features.short_prompts.served import ShortPrompts
from sglang_dspark.gpu_paths import is_on


def verifies_prompts(args: ServerArgs) -> bool:
    """Return whether the operator asks for it. On a CPU it is slower, and no GPU has run it."""
    server = attached(args)
    if not isinstance(server, DSparkServer):
        return False
    if (rows := server.config.prompt_rows) is not None:
        return rows > 0
    return args.device != "cpu" and is_on("prompt-rows", server.config.unproven, on_gpu=True)


FEATURE = Feature(
    __name__,
    is_used=verifies_prompts,
    part=ShortPrompts.of,
)
