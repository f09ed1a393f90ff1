"""Who answers to ``--speculative-algorithm DSPARK``, and SGLang's resolution of its arguments when we do."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import fields
from typing import Any

from sglang_dspark.config import ENV_PREFIX, DSparkConfig, add_flags, flag_dest, flag_name, flag_texts, knob_text
from sglang_dspark.engine import support
from sglang_dspark.engine.compat import arguments
from sglang_dspark.engine.settled import TargetOnly
from sglang_dspark.engine.startup import hooks, server_args
from sglang_dspark.engine.startup.names import ALGORITHM, COMMON_NAME
from sglang_dspark.errors import CheckpointError, ConfigError, UnservedError

logger = logging.getLogger(__name__)

_TEXTS = "_dspark_flags"  # texts of our flags, on the way from the command line to the resolution


def add_cli_args(result: Any, parser: Any) -> None:
    """Add our flags to SGLang's parser."""
    add_flags(parser, but=_flags_of_sglang())


def _flags_of_sglang() -> frozenset[str]:
    """Our knobs whose flags SGLang has as well; they keep its help and arrive by the same name."""
    return frozenset(knob.name for knob in fields(DSparkConfig) if arguments.has_field(flag_dest(knob.name)))


def from_cli_args(original: Callable[..., Any], cls: type, namespace: Any) -> Any:
    """Make a ``ServerArgs`` from the command line, with DSPARK where it was asked of us.

    Raises:
        ConfigError, CheckpointError, EngineError: our options, the drafter, the target or SGLang cannot be served.
    """
    texts = flag_texts(namespace)
    if arguments.RESOLVED_LATER:
        args = original(cls, namespace)
        setattr(args, _TEXTS, texts)
        return args
    if not _is_ours(namespace, texts):
        return original(cls, namespace)
    return _resolve(copy(namespace), texts, lambda args: original(cls, args))


def resolve_once(original: Callable[..., None], args: Any) -> None:
    """Resolve a ``ServerArgs`` that was made unresolved, with DSPARK where it was asked of us.

    Raises:
        ConfigError, CheckpointError, EngineError: our options, the drafter, the target or SGLang cannot be served.
    """
    # Every process asks, and in all but the first it is done.
    if getattr(args, "_resolution_finished", False):
        original(args)
        return
    texts = getattr(args, _TEXTS, {}) | _texts_of_fields(args)
    if not _is_ours(args, texts):
        original(args)
        return
    args.speculative_algorithm = ALGORITHM

    def run(args: Any) -> Any:
        original(args)
        return args

    _resolve(args, texts, run)


def _texts_of_fields(args: Any) -> dict[str, str | None]:
    """Of our knobs, those that are arguments of SGLang as well; its offline engine sets these by their names."""
    given = {name: getattr(args, flag_dest(name)) for name in _flags_of_sglang()}
    return {name: str(value) for name, value in given.items() if value is not None}


def _is_ours(args: Any, texts: Mapping[str, str | None]) -> bool:
    """Whether DSPARK was asked for, of the plugin and not of SGLang.

    Raises:
        ConfigError: it was asked of an SGLang that has none, or with options that SGLang's own does not know.
    """
    name = (args.speculative_algorithm or "").upper()
    if name == ALGORITHM != COMMON_NAME:
        return True
    if name != COMMON_NAME:
        return False
    engine = knob_text("engine", texts)
    if engine not in (None, "plugin", "builtin"):
        raise ConfigError(f"{flag_name('engine')}={engine!r}: must be builtin or plugin")
    if ALGORITHM == COMMON_NAME:
        if engine == "builtin":
            raise ConfigError(
                f"{flag_name('engine')}=builtin: sglang {support.installed_sglang()} has no DSPARK of its own; "
                "pass plugin or drop the flag"
            )
        return True
    if engine == "plugin":
        return True
    ours = [name for name, text in texts.items() if text is not None and name not in ("engine", *_flags_of_sglang())]
    if ours:
        raise ConfigError(
            f"{flag_name(ours[0])}={texts[ours[0]]} belongs to the plugin, and --speculative-algorithm DSPARK is "
            f"SGLang's own here; pass {flag_name('engine')} plugin as well, or drop the flag"
        )
    return False


def _resolve(args: Any, texts: Mapping[str, str | None], run: Callable[[Any], Any]) -> Any:
    """Resolve ``args`` with DSPARK, or where that is wished and it cannot be, for the target alone.

    Args:
        run: SGLang's resolution; returns the arguments.
    """
    config = DSparkConfig.resolve(texts, foreign=arguments.variables_of_sglang(ENV_PREFIX))
    support.check_sglang_version(support.installed_sglang(), untested=config.untested_sglang)
    undo = arguments.undo_of(args)
    try:
        with server_args.prepared(args, config):
            return run(args)
    except (CheckpointError, UnservedError) as error:
        if config.fallback != "target-only":
            raise
        undo()
        return _target_only(args, run, str(error))


def _target_only(args: Any, run: Callable[[Any], Any], reason: str) -> Any:
    """The arguments of a plain server, which says in our routes why it is one."""
    for field in arguments.fields():
        if field.name.startswith("speculative_"):
            setattr(args, field.name, field.default)
    settled = run(args)
    arguments.attach(settled, TargetOnly(reason))
    hooks.install("routes")
    logger.warning("DSPARK: effective decode path target-only, without speculation: %s", reason)
    return settled
