"""Answer for `doctor` if a server that starts now would know DSPARK and serve a pair."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from sglang.srt.environ import envs
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang.srt.speculative.spec_registry import get_spec

from sglang_dspark.config import DSparkConfig, flag_name
from sglang_dspark.draft.resolved import ResolvedDrafter
from sglang_dspark.engine.feature import other_servers
from sglang_dspark.engine.launch import model_checks
from sglang_dspark.engine.launch.context import LaunchContext
from sglang_dspark.engine.launch.hook import Hook
from sglang_dspark.engine.launch.hooks import all_hooks
from sglang_dspark.engine.launch_state import DSparkServer
from sglang_dspark.engine.support import ALGORITHM


def is_registered() -> bool:
    """Load the plugins as SGLang's own processes do, and return whether DSPARK is known then."""
    load_plugins()
    return get_spec(ALGORITHM) is not None


def has_flags() -> bool:
    """Return whether our flags are on the server's command line. Call :func:`is_registered` first."""
    parser = ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return flag_name("engine") in parser.format_help()  # SGLang's own worker has other flags with our prefix


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


def why_own_worker(target: Path) -> str | None:
    """Return why a server on this machine would take SGLang's own worker for a target; None if it does not."""
    if not other_servers():
        return None
    args = ServerArgs(model_path=str(target), device="cuda" if torch.cuda.is_available() else "cpu")
    return model_checks.why_not_ours(LaunchContext.of(args, DSparkConfig()))


def resolve(command: Sequence[str]) -> None:
    """Resolve the arguments of a server as its start does, before it loads anything. It changes this process.

    Args:
        command: flags of ``sglang.launch_server``.

    Raises:
        Exception: whatever would end the start.
    """
    load_plugins()
    prepare_server_args(list(command)).resolve_once()


def launch_without_flags(target: Path, drafter: ResolvedDrafter) -> LaunchContext:
    """Return what the checks of ``Stage.MODELS`` look at, for a server on this machine with our default options.

    Raises:
        OSError, ValueError: SGLang cannot read the target.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    args = ServerArgs(model_path=str(target), device=device, speculative_draft_model_path=drafter.path)
    context = LaunchContext(args, DSparkServer(DSparkConfig(), drafter, dummy_draft=False))
    _ = context.target
    return context
