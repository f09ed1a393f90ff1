"""Where prefixes may move to host memory: SGLang's hierarchical cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache import memory_pool_host

from sglang_dspark.engine.support import INSTALL_SGLANG, installed_sglang

TAKES_DRAFT_POOL = hasattr(HiCacheController, "set_draft_kv_pool")
"""Whether its cache copies a draft pool along that lies beside the target's."""


def host_cache_refusals(args: Any) -> Iterator[str]:
    """What is wrong with a server whose prefixes move to host memory; nothing about one without.

    Args:
        args: SGLang's ``ServerArgs``.
    """
    if not args.enable_hierarchical_cache:
        return
    if not TAKES_DRAFT_POOL:
        yield (
            f"DSPARK cannot run with --enable-hierarchical-cache on sglang {installed_sglang()}, which lays draft K/V "
            f"out in another way; {INSTALL_SGLANG}"
        )
    elif not hasattr(memory_pool_host, "transfer_kv_direct"):
        yield (
            f"DSPARK cannot run with --enable-hierarchical-cache on {args.device}: SGLang copies K/V to host memory "
            "with CUDA kernels; drop the flag"
        )
