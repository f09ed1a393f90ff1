"""Refuse adapters that no kernel serves on this machine."""

import torch

from sglang_dspark.engine.launch.check import Check, Stage
from sglang_dspark.engine.launch.context import LaunchContext
from sglang_dspark.engine.sglang_types import ServerArgs

BACKENDS = {"cuda": ("csgmv", "triton"), "cpu": ("torch_native",)}
"""LoRA backends whose kernels compute ragged rows. On a GPU the torch one would read their numbers on the host."""


def backend(context: LaunchContext) -> str | None:
    """Refuse kernels of adapters that cannot read ragged rows."""
    if not (asked := _asks_for_adapters(context.args)) or context.args.device not in BACKENDS:
        return None
    served = BACKENDS[context.args.device]
    if context.args.lora_backend in served:
        return None
    return (
        f"DSPARK cannot run with {asked} and --lora-backend={context.args.lora_backend} on {context.args.device}; pass "
        f"--lora-backend {' or '.join(served)}"
    )


def pinned_memory(context: LaunchContext) -> str | None:
    """Refuse adapters on a machine where PyTorch cannot pin memory."""
    if not (asked := _asks_for_adapters(context.args)) or context.args.device != "cpu":
        return None
    try:
        torch.empty(1).pin_memory()
    except RuntimeError:
        return (
            f"DSPARK cannot run with {asked} on this machine: SGLang keeps adapters in pinned memory, which PyTorch "
            "offers only beside a GPU; drop the flag"
        )
    return None


def _asks_for_adapters(args: ServerArgs) -> str | None:
    """Return the flag that asks for adapters."""
    if args.enable_lora:
        return "--enable-lora"
    return "--lora-paths" if args.lora_paths and args.enable_lora is None else None


def adapters_fit(args: ServerArgs) -> None:
    """Accept adapters, in place of SGLang's check whether they can run beside the algorithm: ours are made above."""


CHECKS = (
    Check("kernels of adapters", Stage.FLAGS, backend),
    Check("memory of adapters", Stage.FLAGS, pinned_memory),
)
