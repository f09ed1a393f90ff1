"""Has SGLang resolve its arguments for the worker that decodes, see ``decision.py``."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable

from sglang.srt.plugins.hook_registry import HookType

from sglang_dspark.config import add_flags, flag_dest, flag_texts
from sglang_dspark.engine import hooks
from sglang_dspark.engine.compat import arguments
from sglang_dspark.engine.hooks import hook
from sglang_dspark.engine.launch.decision import SHARED, decide
from sglang_dspark.engine.sglang_types import ServerArgs

_TEXTS = "_dspark_flags"  # texts of our flags, on the way from the command line to the resolution


@hook(
    "sglang.srt.server_args.ServerArgs.add_cli_args",
    HookType.AFTER,
    where="flags",
    reason="SGLang has no plugin interface for flags",
)
def add_cli_args(result: object, parser: ArgumentParser) -> None:
    """Add our flags to SGLang's parser."""
    add_flags(parser, but=SHARED)


@hook(
    "sglang.srt.server_args.ServerArgs.from_cli_args",
    HookType.AROUND,
    where="flags",
    reason="ServerArgs has no place for the texts of our flags",
)
def from_cli_args(original: Callable[..., ServerArgs], cls: type, namespace: Namespace) -> ServerArgs:
    """Make a ``ServerArgs`` from the command line, with the texts of our flags beside it."""
    args = original(cls, namespace)
    setattr(args, _TEXTS, flag_texts(namespace))
    return args


def given_texts(args: ServerArgs) -> dict[str, str | None]:
    """Return the texts of our options by name; SGLang's offline engine sets those that it has as well as arguments."""
    shared = {name: getattr(args, flag_dest(name)) for name in SHARED}
    return getattr(args, _TEXTS, {}) | {name: str(value) for name, value in shared.items() if value is not None}


@hook(
    "sglang.srt.server_args.ServerArgs.resolve_once",
    HookType.AROUND,
    where="flags",
    reason="what SGLang would decide otherwise is decided before, and undone where the target decodes alone",
)
def resolve_once(original: Callable[..., None], args: ServerArgs) -> None:
    """Resolve a ``ServerArgs``, with DSPARK if it was asked of us, or for the target alone if DSPARK cannot serve.

    Raises:
        ConfigError, CheckpointError, EngineError: our options, the drafter, the target or SGLang cannot be served.
    """
    # Every process asks, and in all but the first it is done.
    if getattr(args, "_resolution_finished", False):
        original(args)
        if arguments.speculating(args) is not None:
            hooks.install(args, "children")
    elif (start := decide(args, given_texts(args))) is None:
        original(args)
    else:
        start.resolve(original, args)
