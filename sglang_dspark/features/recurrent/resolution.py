"""Decide how states are cached, where SGLang resolves its arguments."""

from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
from sglang.srt.plugins.hook_registry import HookType

from sglang_dspark.draft.families import FAMILIES
from sglang_dspark.engine.flags import MIN_REQUESTS, admit
from sglang_dspark.engine.hooks import Moment, hook
from sglang_dspark.engine.server import DSparkServer, attached
from sglang_dspark.engine.sglang_types import ServerArgs
from sglang_dspark.errors import ConfigError


def keeps_states(architectures: Sequence[str]) -> bool:
    """Return whether targets of these classes are served and have such layers."""
    return any(family.recurrent and family.architecture in architectures for family in FAMILIES)


@hook(
    "sglang.srt.arg_groups.model_hook.handle_mamba_radix_cache",
    HookType.AROUND,
    where="flags",
    reason="for targets with recurrent layers SGLang chooses snapshots of states, and then finds that a CPU has none",
    by=Moment.SOME_TIME,
)
def resolve_states(original: Callable[..., None], args: ServerArgs, hf_config: Any) -> None:
    """Resolve how states are cached; on a CPU with DSPARK as SGLang can there, which asks for a limit of requests too.

    Raises:
        ConfigError: the operator asks for what it cannot.
    """
    ours = isinstance(attached(args), DSparkServer) and keeps_states(hf_config.architectures)
    if ours and resolving_view(args).device == "cpu":
        leave_snapshots_out(args)
        if args.max_running_requests is None:
            admit(args, MIN_REQUESTS)
    original(args, hf_config)


def leave_snapshots_out(args: ServerArgs) -> None:
    """Keep states without the snapshots that SGLang would choose, and so without overlap.

    Raises:
        ConfigError: the operator asks for snapshots.
    """
    strategy = args.mamba_radix_cache_strategy
    if strategy not in ("auto", "no_buffer"):
        raise ConfigError(
            f"DSPARK cannot run with --mamba-radix-cache-strategy={strategy} on cpu: SGLang takes snapshots of "
            "recurrent states with kernels of a GPU; drop the flag"
        )
    declare_resolution(args, "dspark", mamba_radix_cache_strategy="no_buffer", disable_overlap_schedule=True)
