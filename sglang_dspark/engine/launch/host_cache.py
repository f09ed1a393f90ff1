"""Where prefixes may move to host memory: SGLang's hierarchical cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

DEVICES = ("cuda",)
"""Devices from which SGLang's kernels copy K/V to host memory."""


def host_cache_refusals(args: Any) -> Iterator[str]:
    """What is wrong with a server whose prefixes move to host memory; nothing about one without.

    Args:
        args: SGLang's ``ServerArgs``.
    """
    if args.enable_hierarchical_cache and args.device not in DEVICES:
        yield (
            f"DSPARK cannot run with --enable-hierarchical-cache on {args.device}: SGLang copies K/V to host memory "
            "with CUDA kernels; drop the flag"
        )
