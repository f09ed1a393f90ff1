"""Refuse options that several nodes cannot have."""

from sglang_dspark.config import flag_name
from sglang_dspark.engine.feature import Check, LaunchContext, Stage


def fallback_of_nodes(context: LaunchContext) -> str | None:
    """Refuse nodes of which some could fall back and others not."""
    if context.args.nnodes == 1 or context.server.config.fallback != "target-only":
        return None
    return (
        f"{flag_name('fallback')}=target-only cannot be combined with --nnodes={context.args.nnodes}: if only some "
        "nodes fall back, the server deadlocks; drop the flag"
    )


CHECKS = (Check("fallback of nodes", Stage.OPTIONS, fallback_of_nodes),)
