"""Decides whose worker decodes, and why, and has SGLang resolve its arguments for it.

Until it is decided, nothing is written to these.
"""

import io
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import fields, replace

from sglang.srt.arg_groups.arg_utils import record_fields
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.server_args import ServerArgs as Record
from sglang.srt.server_args import prepare_server_args

from sglang_dspark.config import ENV_PREFIX, DSparkConfig, add_flags, flag_dest, flag_name, flag_texts, option_text
from sglang_dspark.engine import hooks, support
from sglang_dspark.engine.checks import failures, refuse, why_not_ours
from sglang_dspark.engine.feature import LaunchContext, Stage, all_features
from sglang_dspark.engine.hooks import hook
from sglang_dspark.engine.server import (
    Attached,
    DSparkServer,
    OtherServer,
    TargetOnly,
    looked_up,
    restore,
    snapshot,
    speculating,
    variables_of_sglang,
)
from sglang_dspark.engine.sglang_types import ServerArgs
from sglang_dspark.engine.start import LeftToSGLang, find_server, start
from sglang_dspark.engine.support import ALGORITHM, COMMON_NAME
from sglang_dspark.errors import CheckpointError, ConfigError, UnservedError

SHARED = {option.name for option in fields(DSparkConfig)} & {
    field.name.removeprefix(flag_dest("")) for field in record_fields(Record)
}
"""Our options whose flags SGLang has as well; they keep its help and arrive by the same name."""


_OF_ANY_START = ("engine", "fallback", "untested_sglang")
"""Our options that say which worker decodes, and nothing of how."""


def decide(args: ServerArgs, texts: Mapping[str, str | None]) -> Attached | LeftToSGLang | None:
    """Return whose worker decodes; None without DSPARK of ours. ``args`` stay as they are.

    Args:
        args: as the operator wrote them.
        texts: of our options, by name.

    Raises:
        ConfigError, CheckpointError, EngineError: our options, the drafter, the target or SGLang cannot be served.
    """
    if not _is_ours(args, texts):
        return None
    config = DSparkConfig.resolve(texts, foreign=variables_of_sglang(ENV_PREFIX))
    support.check_sglang_version(support.installed_sglang(), untested=config.untested_sglang)
    if _algorithm(args) == ALGORITHM:
        config = replace(config, engine="plugin")
    if config.engine not in ("auto", "plugin"):
        return _asked_for(config)
    if config.engine == "auto" and (left := _left_to_sglang(args, config, texts)) is not None:
        return left
    try:
        server = find_server(args, config)
        if config.fallback == "target-only":
            refuse(LaunchContext(looked_up(args), server), Stage.MODELS)
    except (CheckpointError, UnservedError) as error:
        if config.fallback != "target-only":
            raise
        return TargetOnly(str(error))
    return server


def _asked_for(config: DSparkConfig) -> OtherServer:
    """Return the server with the worker that the operator names.

    Raises:
        ConfigError: there is none of this name.
    """
    for feature in all_features():
        if feature.other_server is not None and feature.other_server.engine == config.engine:
            return feature.other_server(config)
    raise ConfigError(
        f"{flag_name('engine')}={config.engine} asks for a worker that this installation of sglang-dspark does not "
        "have; pass auto, plugin or builtin"
    )


def _left_to_sglang(args: ServerArgs, config: DSparkConfig, texts: Mapping[str, str | None]) -> LeftToSGLang | None:
    """Return the start with SGLang's own worker, unmodified, of what ours leaves to it; None if ours decodes.

    Raises:
        ConfigError: an option would have no effect there.
    """
    try:
        context = LaunchContext.of(looked_up(args), config)
        why = why_not_ours(context)
    except (OSError, ValueError):  # of a target that cannot be read, SGLang says so when it resolves the arguments
        return None
    if why is None:
        return None
    for option in fields(DSparkConfig):
        name, value = option.name, getattr(config, option.name)
        known = name in _OF_ANY_START or (name in SHARED and texts.get(name) is not None)
        if value != option.default and not known:
            raise ConfigError(
                f"{flag_name(name)}={value} belongs to the plugin's worker, and SGLang's own decodes here: {why}; drop "
                f"the flag, or pass {flag_name('engine')} scheduled to have the plugin's policies decide"
            )
    # The drafter is not looked at: what is said of options may not hold for it.
    refusals = [message for message, unserved in failures(context, Stage.MODELS).items() if unserved]
    return LeftToSGLang(why, "\n".join(refusals), config.fallback == "target-only")


def _is_ours(args: ServerArgs, texts: Mapping[str, str | None]) -> bool:
    """Return whether DSPARK was asked for, of the plugin and not of SGLang.

    Raises:
        ConfigError: it was asked of both, or of SGLang with options that SGLang's own does not know.
    """
    name = _algorithm(args)
    if name not in (COMMON_NAME, ALGORITHM):
        return False
    engine = option_text("engine", texts)
    if engine in ("scheduled", "builtin") and name == ALGORITHM:
        raise ConfigError(
            f"--speculative-algorithm {ALGORITHM} is the plugin, and {flag_name('engine')}={engine} asks for SGLang's "
            "own worker; drop one of them"
        )
    if engine != "builtin":
        return True
    ours = [name for name, text in texts.items() if text is not None and name not in ("engine", *SHARED)]
    if ours:
        raise ConfigError(
            f"{flag_name(ours[0])}={texts[ours[0]]} belongs to the plugin, and {flag_name('engine')} builtin asks for "
            "SGLang's own worker; drop one of them"
        )
    return False


def _algorithm(args: ServerArgs) -> str:
    return (args.speculative_algorithm or "").upper()


_TEXTS = "_dspark_flags"  # texts of our flags, on the way from the command line to the resolution
_ASKED = "_dspark_asked"  # this module was asked whose worker decodes


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
    """Make a ``ServerArgs`` from the command line, and attach the texts of our flags to it."""
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
    reason="what SGLang would decide otherwise is decided before, and undone where the target decodes without drafts",
)
def resolve_once(original: Callable[..., None], args: ServerArgs) -> None:
    """Resolve a ``ServerArgs``, with DSPARK if it was asked of us, or for the target alone if DSPARK cannot serve.

    Raises:
        ConfigError, CheckpointError, EngineError: our options, the drafter, the target or SGLang cannot be served.
    """
    # Every process asks, and in all but the first it is done.
    if getattr(args, "_resolution_finished", False):
        original(args)
        if speculating(args) is not None:
            hooks.install(args, "children")
        return
    setattr(args, _ASKED, True)
    if (server := decide(args, given_texts(args))) is None:
        original(args)
    else:
        start(server, original, args)


@hook(
    "sglang.srt.server_args.ServerArgs.check_server_args",
    HookType.AROUND,
    where="flags",
    reason="of a program that makes its arguments itself, SGLang resolves them before it loads plugins",
)
def check_server_args(original: Callable[..., None], args: ServerArgs) -> None:
    """Check arguments; those that were resolved before the plugin was loaded are resolved again, if they ask for us.

    Frameworks make a ``ServerArgs`` themselves. SGLang resolves it for its own DSPARK then, and loads plugins only
    right before it asks for this check. Of a record, fields hold what was asked for, which cannot be changed any more,
    so a new one is made of them.

    Raises:
        ConfigError, CheckpointError, EngineError: as :func:`resolve_once`.
    """
    if not hasattr(args, _ASKED) and _is_ours(args, given_texts(args)):
        again = Record(**{field.name: getattr(args, field.name) for field in record_fields(Record)})
        again.resolve_once()
        restore(args, snapshot(again))
    original(args)


def resolve(command: Sequence[str]) -> LaunchContext | str:
    """Resolve the flags of ``sglang.launch_server`` as a start does before it loads anything. It changes this process.

    Returns:
        The facts of a start with our worker; why another one decodes, if it does.

    Raises:
        ConfigError: SGLang's parser does not take the flags.
        Exception: whatever else would end the start.
    """
    load_plugins()
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            args = prepare_server_args(list(command))
    except SystemExit as ended:
        # The parser prints the usage of all flags, and then what is wrong.
        wrong = said.getvalue().rpartition("error: ")[2].strip()
        raise ConfigError(
            f"sglang.launch_server does not take these flags: {wrong}; its --help lists those that it takes"
        ) from ended
    found = decide(args, given_texts(args))
    args.resolve_once()
    if isinstance(found, LeftToSGLang):
        return found.reason
    server = speculating(args)
    assert server is not None, "the flags ask for DSPARK"
    return LaunchContext(args, server) if isinstance(server, DSparkServer) else server.reason
