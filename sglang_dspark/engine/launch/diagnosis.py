"""Answer for `doctor` if a server that starts now would know DSPARK and serve a pair."""

import io
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr

from sglang.srt.environ import envs
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args

from sglang_dspark.engine.compat.arguments import speculating
from sglang_dspark.engine.launch.context import LaunchContext
from sglang_dspark.engine.launch.decision import decide
from sglang_dspark.engine.launch.hook import Hook
from sglang_dspark.engine.launch.hooks import all_hooks
from sglang_dspark.engine.launch.resolution import given_texts
from sglang_dspark.engine.launch.starts import LeftToSGLang
from sglang_dspark.engine.launch_state import DSparkServer
from sglang_dspark.errors import ConfigError


def plugin_filter() -> str | None:
    """Return SGLang's comma-separated list of the plugins that it may load; None means all."""
    return envs.SGLANG_PLUGINS.get() or None


def hooks() -> Iterator[tuple[Hook, str | None]]:
    """Yield every hook, and what is wrong with the function that it patches; None if it is there."""
    for hook in all_hooks():
        try:
            hook.load_target()
        except (ImportError, AttributeError) as error:
            yield hook, str(error)
        else:
            yield hook, None


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
        raise ConfigError(f"SGLang ends the start: {said.getvalue().rpartition('error: ')[2].strip()}") from ended
    start = decide(args, given_texts(args))
    args.resolve_once()
    if isinstance(start, LeftToSGLang):
        return start.reason
    server = speculating(args)
    assert server is not None, "the flags ask for DSPARK"
    return LaunchContext(args, server) if isinstance(server, DSparkServer) else server.reason
