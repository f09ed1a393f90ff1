"""Refuse adapters where no memory holds them."""

import torch
from sglang.srt.plugins.hook_registry import HookType

from sglang_dspark.engine.feature import Check, LaunchContext, Stage
from sglang_dspark.engine.hooks import Moment, hook
from sglang_dspark.engine.sglang_types import ServerArgs


def asks_for_adapters(args: ServerArgs) -> bool:
    """Return whether the operator wants adapters."""
    return bool(args.enable_lora or (args.enable_lora is None and args.lora_paths))


def pinned_memory(context: LaunchContext) -> str | None:
    """Refuse adapters on a machine where PyTorch cannot pin memory."""
    args = context.args
    if not asks_for_adapters(args) or args.device != "cpu":
        return None
    try:
        torch.empty(1).pin_memory()
    except RuntimeError:
        asked = "--enable-lora" if args.enable_lora else "--lora-paths"
        return (
            f"DSPARK cannot run with {asked} on this machine: SGLang keeps adapters in pinned memory, which PyTorch "
            "offers only beside a GPU; drop the flag"
        )
    return None


@hook(
    "sglang.srt.arg_groups.lora_hook.check_lora_speculative_compatibility",
    HookType.REPLACE,
    where="front_end",
    reason="SGLang refuses LoRA beside every speculative algorithm that it does not know by name",
    by=Moment.SOME_TIME,
)
def adapters_fit(args: ServerArgs) -> None:
    """Accept adapters, in place of SGLang's check whether they can run beside the algorithm: ours are made above."""


CHECKS = (Check("memory of adapters", Stage.FLAGS, pinned_memory),)
