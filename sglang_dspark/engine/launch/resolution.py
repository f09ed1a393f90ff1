"""Decides between the plugin and SGLang's own DSPARK, and has SGLang resolve its arguments for the plugin."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from sglang.srt.arg_groups.arg_utils import record_fields
from sglang.srt.server_args import ServerArgs

from sglang_dspark.config import ENV_PREFIX, DSparkConfig, add_flags, flag_dest, flag_name, flag_texts, option_text
from sglang_dspark.engine import support
from sglang_dspark.engine.builtin.launch import ScheduledServer
from sglang_dspark.engine.compat import arguments
from sglang_dspark.engine.launch import hooks
from sglang_dspark.engine.launch.context import LaunchContext
from sglang_dspark.engine.launch.launch import Launch
from sglang_dspark.engine.launch.model_checks import why_own_worker
from sglang_dspark.engine.launch_state import TargetOnly
from sglang_dspark.engine.support import ALGORITHM, COMMON_NAME
from sglang_dspark.errors import CheckpointError, ConfigError, UnservedError

logger = logging.getLogger(__name__)

_TEXTS = "_dspark_flags"  # texts of our flags, on the way from the command line to the resolution
_SHARED = {option.name for option in fields(DSparkConfig)} & {
    field.name.removeprefix(flag_dest("")) for field in record_fields(ServerArgs)
}
"""Our options whose flags SGLang has as well; they keep its help and arrive by the same name."""


def add_cli_args(result: Any, parser: Any) -> None:
    """Add our flags to SGLang's parser."""
    add_flags(parser, but=_SHARED)


def from_cli_args(original: Callable[..., Any], cls: type, namespace: Any) -> Any:
    """Make a ``ServerArgs`` from the command line, with the texts of our flags beside it."""
    args = original(cls, namespace)
    setattr(args, _TEXTS, flag_texts(namespace))
    return args


def resolve_once(original: Callable[..., None], args: Any) -> None:
    """Resolve a ``ServerArgs``, with DSPARK if it was asked of us, or for the target alone if DSPARK cannot serve.

    Raises:
        ConfigError, CheckpointError, EngineError: our options, the drafter, the target or SGLang cannot be served.
    """
    # Every process asks, and in all but the first it is done.
    if getattr(args, "_resolution_finished", False):
        original(args)
        server = arguments.attached(args)
        if isinstance(server, Launch | ScheduledServer):
            hooks.install(args, "detokenizer")
        if isinstance(server, ScheduledServer):
            hooks.install(args, "own_worker")
        return
    texts = given_texts(args)
    if not _is_ours(args, texts):
        original(args)
        return
    config = DSparkConfig.resolve(texts, foreign=arguments.variables_of_sglang(ENV_PREFIX))
    support.check_sglang_version(support.installed_sglang(), untested=config.untested_sglang)
    if args.speculative_algorithm.upper() == ALGORITHM:
        config = replace(config, engine="plugin")
    written = arguments.snapshot(args)
    try:
        _resolve_dspark(original, args, config, written)
    except (CheckpointError, UnservedError) as error:
        if config.fallback != "target-only":
            raise
        arguments.restore(args, written)
        _resolve_target_only(original, args, str(error))


def _resolve_dspark(original: Callable[..., None], args: Any, config: DSparkConfig, written: Any) -> None:
    """Resolve the arguments for the worker that is asked for, or that serves the pair.

    Raises:
        UnservedError: none does.
        ConfigError, CheckpointError: options, or the drafter, cannot be served.
    """
    if config.engine == "scheduled":
        _resolve_own_worker(original, args, config, f"{flag_name('engine')} asks for it")
        return
    args.speculative_algorithm = ALGORITHM
    try:
        Launch.before(args, config)
        original(args)
    except (ConfigError, CheckpointError) as error:
        why = None if config.engine == "plugin" else _why_own_worker(args, config)
        if why is None:
            raise
        arguments.restore(args, written)
        try:
            _resolve_own_worker(original, args, config, f"the plugin's worker does not serve {why}")
        except ValueError as other:
            raise UnservedError(f"{error}\nSGLang's own worker does not serve it either: {other}") from other


def _why_own_worker(args: Any, config: DSparkConfig) -> str | None:
    """Return why SGLang's own worker may serve what ours does not; None if that is not so, or the target unreadable."""
    try:
        return why_own_worker(LaunchContext.of(args, config))
    except (OSError, ValueError):
        return None


def _resolve_own_worker(original: Callable[..., None], args: Any, config: DSparkConfig, because: str) -> None:
    args.speculative_algorithm = COMMON_NAME
    ScheduledServer.before(args, config, because)
    original(args)
    ScheduledServer.settle(args)
    hooks.install(args, "routes", "front_end", "own_worker")
    logger.info("DSPARK: %s", arguments.attached(args).reason)


def schedule_own_worker(algorithm: Any, server_args: Any) -> None:
    """Hook SGLang's own worker, in the scheduler that is about to make it."""
    arguments.attached(server_args).set_mode()
    hooks.install(server_args, "any_worker", "scheduled")


def given_texts(args: Any) -> dict[str, str | None]:
    """Return the texts of our options by name; SGLang's offline engine sets those that it has as well as arguments."""
    shared = {name: getattr(args, flag_dest(name)) for name in _SHARED}
    return getattr(args, _TEXTS, {}) | {name: str(value) for name, value in shared.items() if value is not None}


def _is_ours(args: Any, texts: Mapping[str, str | None]) -> bool:
    """Return whether DSPARK was asked for, of the plugin and not of SGLang.

    Raises:
        ConfigError: it was asked of both, or of SGLang with options that SGLang's own does not know.
    """
    name = (args.speculative_algorithm or "").upper()
    if name not in (COMMON_NAME, ALGORITHM):
        return False
    engine = option_text("engine", texts)
    if engine in ("scheduled", "builtin") and name == ALGORITHM:
        raise ConfigError(
            f"--speculative-algorithm {ALGORITHM} is the plugin, and {flag_name('engine')}={engine} asks for SGLang's "
            "own DSPARK; drop one of them"
        )
    if engine != "builtin":
        return True
    ours = [name for name, text in texts.items() if text is not None and name not in ("engine", *_SHARED)]
    if ours:
        raise ConfigError(
            f"{flag_name(ours[0])}={texts[ours[0]]} belongs to the plugin, and {flag_name('engine')} builtin asks for "
            "SGLang's own DSPARK; drop one of them"
        )
    return False


def _resolve_target_only(original: Callable[..., None], args: Any, reason: str) -> None:
    """Resolve the arguments of a plain server, which says in our routes why it is one."""
    for field in record_fields(ServerArgs):
        if field.name.startswith("speculative_"):
            setattr(args, field.name, field.default)
    original(args)
    arguments.attach(args, TargetOnly(reason))
    hooks.install(args, "routes")
    logger.warning("DSPARK: effective decode path target-only, without speculation: %s", reason)
