"""Where LoRA adapters of the target are served."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from sglang_dspark.engine.compat.arguments import CHECKS_ADAPTERS
from sglang_dspark.engine.support import INSTALL_SGLANG, installed_sglang

BACKENDS = {"cuda": ("csgmv", "triton"), "cpu": ("torch_native",)}
"""LoRA backends whose kernels compute ragged rows. On a GPU the torch one would read their numbers on the host."""


def adapter_refusals(args: Any) -> Iterator[str]:
    """What is wrong with a server of adapters; nothing about one without them.

    Args:
        args: SGLang's ``ServerArgs``, for one of the served devices.
    """
    if not (args.enable_lora or args.lora_paths):
        return
    flag = "--enable-lora" if args.enable_lora else "--lora-paths"
    if not CHECKS_ADAPTERS:
        yield (
            f"DSPARK cannot run with {flag} on sglang {installed_sglang()}, which takes it that a step verifies as "
            f"many tokens for every request; {INSTALL_SGLANG}"
        )
    served = BACKENDS[args.device]
    if args.lora_backend not in served:
        yield (
            f"DSPARK cannot run with {flag} and --lora-backend={args.lora_backend} on {args.device}; "
            f"pass --lora-backend {' or '.join(served)}"
        )
    if args.device == "cpu" and not _can_pin():
        yield (
            f"DSPARK cannot run with {flag} on this machine: SGLang keeps adapters in pinned memory, which PyTorch "
            "has where there is a GPU; drop the flag"
        )


def _can_pin() -> bool:
    try:
        torch.empty(1).pin_memory()
    except RuntimeError:
        return False
    return True


def check_adapters_alone(original: Callable[[Any], None], args: Any) -> None:
    """Around SGLang's checks of its LoRA arguments, as they are without speculation."""
    algorithm, args.speculative_algorithm = args.speculative_algorithm, None
    try:
        original(args)
    finally:
        args.speculative_algorithm = algorithm
