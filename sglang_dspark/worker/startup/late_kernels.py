"""Says so when a kernel is compiled after start-up: requests wait for it, and the warm-up has missed it."""

import logging
import sys
from typing import Any

import triton
from triton.runtime.jit import KernelInterface

logger = logging.getLogger(__name__)


def report_late_kernels() -> None:
    """Log every form of a kernel of ours that Triton compiles, or loads from its cache, from now on."""
    triton.knobs.runtime.kernel_load_end_hook.add(_loaded)  # a second time is none


def _loaded(module: Any, function: Any, name: str, metadata_group: Any, hash: str) -> None:
    """Triton calls this once for every form of a kernel, with the name of its function."""
    if name in _own_kernels():
        logger.warning(
            "DSPARK: the kernel %s was compiled or loaded after start-up, and a step has waited for it (%s); please "
            "report this, with the flags of the server and the options of the request",
            name,
            hash[:12],
        )


def _own_kernels() -> set[str]:
    modules = [module for name, module in sys.modules.items() if name.startswith("dspark_kernels.")]
    values = [value for module in modules for value in vars(module).values()]
    return {value.__name__ for value in values if isinstance(value, KernelInterface)}
