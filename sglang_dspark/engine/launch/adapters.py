"""Where LoRA adapters of the target are served."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

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


def fits_speculation(args: Any) -> None:
    """In place of SGLang's check whether LoRA can run beside the algorithm; :func:`adapter_refusals` has said so."""
