"""What `doctor` asks of SGLang: would a server that starts now know DSPARK?"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterator

from sglang.srt.environ import envs
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_registry import get_spec

from sglang_dspark.config import flag_name
from sglang_dspark.engine.launch.hooks import HOOKS, Hook
from sglang_dspark.engine.launch.names import ALGORITHM


def is_registered() -> bool:
    """Load the plugins as SGLang's own processes do, then look DSPARK up."""
    load_plugins()
    return get_spec(ALGORITHM) is not None


def has_flags() -> bool:
    """Return whether our flags are on the server's command line. Call :func:`is_registered` first."""
    parser = ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return flag_name("engine") in parser.format_help()  # SGLang's own DSPARK has other flags with our prefix


def plugin_filter() -> str | None:
    """SGLang's comma-separated list of the plugins it may load; None means all."""
    return envs.SGLANG_PLUGINS.get() or None


def hooks() -> Iterator[tuple[Hook, str | None]]:
    """Every hook, and what is wrong with the function that it patches; None where it is there."""
    for hook in HOOKS:
        try:
            hook.load_target()
        except (ImportError, AttributeError) as error:
            yield hook, str(error)
        else:
            yield hook, None
