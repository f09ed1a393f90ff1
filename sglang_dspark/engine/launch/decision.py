"""Decides whose worker decodes, and why, before anything is written to SGLang's arguments."""

from collections.abc import Mapping
from dataclasses import fields, replace

from sglang.srt.arg_groups.arg_utils import record_fields
from sglang.srt.server_args import ServerArgs as Record

from sglang_dspark.config import ENV_PREFIX, DSparkConfig, flag_dest, flag_name, option_text
from sglang_dspark.engine import support
from sglang_dspark.engine.compat import arguments
from sglang_dspark.engine.feature import LaunchContext, Stage, other_servers
from sglang_dspark.engine.launch.checks import failures, refuse
from sglang_dspark.engine.launch.launch import Launch
from sglang_dspark.engine.launch.model_checks import why_not_ours
from sglang_dspark.engine.launch.starts import OtherStart, TargetAlone
from sglang_dspark.engine.sglang_types import ServerArgs
from sglang_dspark.engine.support import ALGORITHM, COMMON_NAME
from sglang_dspark.errors import CheckpointError, ConfigError, UnservedError

SHARED = {option.name for option in fields(DSparkConfig)} & {
    field.name.removeprefix(flag_dest("")) for field in record_fields(Record)
}
"""Our options whose flags SGLang has as well; they keep its help and arrive by the same name."""


Start = Launch | OtherStart | TargetAlone
"""With our worker, with another one, or with the target alone."""


def decide(args: ServerArgs, texts: Mapping[str, str | None]) -> Start | None:
    """Return whose worker decodes; None without DSPARK of ours. ``args`` stay as they are.

    Args:
        args: as the operator wrote them.
        texts: of our options, by name.

    Raises:
        ConfigError, CheckpointError, EngineError: our options, the drafter, the target or SGLang cannot be served.
    """
    if not _is_ours(args, texts):
        return None
    config = DSparkConfig.resolve(texts, foreign=arguments.variables_of_sglang(ENV_PREFIX))
    support.check_sglang_version(support.installed_sglang(), untested=config.untested_sglang)
    if _algorithm(args) == ALGORITHM:
        config = replace(config, engine="plugin")
    if config.engine not in ("auto", "plugin"):
        return _asked_for(config)
    if config.engine == "auto" and (other := _left_to_another(args, config)) is not None:
        return other
    try:
        launch = Launch.find(args, config)
        if config.fallback == "target-only":
            refuse(LaunchContext(arguments.looked_up(args), launch), Stage.MODELS)
    except (CheckpointError, UnservedError) as error:
        if config.fallback != "target-only":
            raise
        return TargetAlone(str(error))
    return launch


def _asked_for(config: DSparkConfig) -> OtherStart:
    """Return the start with the worker that the operator names.

    Raises:
        ConfigError: there is none of this name.
    """
    for server in other_servers():
        if server.engine == config.engine:
            return OtherStart(server, config, f"{flag_name('engine')} asks for it")
    raise ConfigError(
        f"{flag_name('engine')}={config.engine} asks for a worker that this installation of sglang-dspark does not "
        "have; pass auto, plugin or builtin"
    )


def _left_to_another(args: ServerArgs, config: DSparkConfig) -> OtherStart | None:
    """Return the start with a worker that may serve what ours leaves to it; None if ours decodes, or no worker does."""
    servers = other_servers()
    if not servers:
        return None
    try:
        context = LaunchContext.of(arguments.looked_up(args), config)
        why = why_not_ours(context)
    except (OSError, ValueError):  # of a target that cannot be read, SGLang says so when it resolves the arguments
        return None
    if why is None:
        return None
    # The drafter is not looked at: what is said of options may not hold for it.
    refusals = [message for message, unserved in failures(context, Stage.MODELS).items() if unserved]
    return OtherStart(servers[0], config, f"the plugin's worker does not serve {why}", "\n".join(refusals))


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
