"""Has SGLang resolve its arguments for the worker that decodes, see ``decision.py``."""

import logging
from argparse import ArgumentParser, Namespace
from collections.abc import Callable

from sglang.srt.arg_groups.arg_utils import record_fields
from sglang.srt.server_args import ServerArgs as Record

from sglang_dspark.config import add_flags, flag_dest, flag_texts
from sglang_dspark.engine.compat import arguments
from sglang_dspark.engine.launch import hooks
from sglang_dspark.engine.launch.decision import SHARED, OtherStart, decide
from sglang_dspark.engine.launch.launch import Launch
from sglang_dspark.engine.launch_state import TargetOnly
from sglang_dspark.engine.sglang_types import ServerArgs
from sglang_dspark.engine.support import ALGORITHM, COMMON_NAME
from sglang_dspark.errors import UnservedError

logger = logging.getLogger(__name__)

_TEXTS = "_dspark_flags"  # texts of our flags, on the way from the command line to the resolution


def add_cli_args(result: object, parser: ArgumentParser) -> None:
    """Add our flags to SGLang's parser."""
    add_flags(parser, but=SHARED)


def from_cli_args(original: Callable[..., ServerArgs], cls: type, namespace: Namespace) -> ServerArgs:
    """Make a ``ServerArgs`` from the command line, with the texts of our flags beside it."""
    args = original(cls, namespace)
    setattr(args, _TEXTS, flag_texts(namespace))
    return args


def given_texts(args: ServerArgs) -> dict[str, str | None]:
    """Return the texts of our options by name; SGLang's offline engine sets those that it has as well as arguments."""
    shared = {name: getattr(args, flag_dest(name)) for name in SHARED}
    return getattr(args, _TEXTS, {}) | {name: str(value) for name, value in shared.items() if value is not None}


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
        return
    match decide(args, given_texts(args)):
        case None:
            original(args)
        case Launch() as launch:
            args.speculative_algorithm = ALGORITHM
            launch.before(args)
            original(args)
        case OtherStart() as start:
            _resolve_other(original, args, start)
        case TargetOnly() as alone:
            _resolve_target_only(original, args, alone)


def _resolve_other(original: Callable[..., None], args: ServerArgs, start: OtherStart) -> None:
    """Resolve the arguments for another worker than ours.

    Raises:
        ValueError: SGLang refuses the worker that was asked for.
        UnservedError: it refuses the worker to which ours leaves the target.
    """
    written = arguments.snapshot(args)
    args.speculative_algorithm = COMMON_NAME
    try:
        server = start.server.before(args, start.config, start.because)
        original(args)
        server = server.settled(args)
    except ValueError as error:
        if not start.refusal:
            raise
        reason = f"{start.refusal}\nSGLang's own worker does not serve it either: {error}"
        if start.config.fallback != "target-only":
            raise UnservedError(reason) from error
        arguments.restore(args, written)
        _resolve_target_only(original, args, TargetOnly(reason))
        return
    arguments.attach(args, server)
    hooks.install(args, "routes", "front_end")
    logger.info("DSPARK: %s", server.reason)


def _resolve_target_only(original: Callable[..., None], args: ServerArgs, alone: TargetOnly) -> None:
    """Resolve the arguments of a plain server, which says in our routes why it is one."""
    for field in record_fields(Record):
        if field.name.startswith("speculative_"):
            setattr(args, field.name, field.default)
    original(args)
    arguments.attach(args, alone)
    hooks.install(args, "routes")
    logger.warning("DSPARK: effective decode path target-only, without speculation: %s", alone.reason)
