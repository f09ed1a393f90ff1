"""Answer for `doctor` if a server that starts now would know DSPARK and serve a pair."""

from collections.abc import Iterator, Sequence

from sglang.srt.environ import envs
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args

from sglang_dspark.engine.compat.arguments import speculating
from sglang_dspark.engine.feature import LaunchContext
from sglang_dspark.engine.hooks import Hook, all_hooks
from sglang_dspark.engine.launch_state import DSparkServer


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
        Exception: whatever would end the start.
    """
    load_plugins()
    args = prepare_server_args(list(command))
    args.resolve_once()
    server = speculating(args)
    assert server is not None, "the flags ask for DSPARK"
    return LaunchContext(args, server) if isinstance(server, DSparkServer) else server.reason
