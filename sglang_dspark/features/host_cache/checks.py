"""Refuse prefixes in host memory where no kernel copies them."""

from sglang_dspark.engine.launch.check import Check, Stage
from sglang_dspark.engine.launch.context import LaunchContext
from sglang_dspark.engine.launch.flag_checks import WINDOWS

DEVICES = ("cuda",)
"""Devices from which SGLang's kernels copy K/V to host memory."""


def host_cache(context: LaunchContext) -> str | None:
    """Refuse prefixes in host memory where no kernel copies them, and of two K/V pools, with which it is not tried."""
    if not context.args.enable_hierarchical_cache:
        return None
    if context.target.is_hybrid_swa:
        return (
            f"DSPARK cannot run with --enable-hierarchical-cache beside a target that has {WINDOWS}; drop the flag, or "
            "pass --disable-hybrid-swa-memory if its heads are alike"
        )
    if context.args.device in DEVICES:
        return None
    return (
        f"DSPARK cannot run with --enable-hierarchical-cache on {context.args.device}: SGLang copies K/V to host "
        "memory with CUDA kernels; drop the flag"
    )


CHECKS = (Check("prefixes in host memory", Stage.FLAGS, host_cache),)
