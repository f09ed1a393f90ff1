"""Stand in for SGLang's kernel package, which is built for CUDA alone, where there is no GPU.

SGLang imports its names ending in ``_cpu`` as soon as it starts on a CPU. Plain servers and servers with DSPARK call
none of them; they belong to other speculative algorithms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__version__ = "0"


def __getattr__(name: str) -> Callable[..., Any]:
    if not name.endswith("_cpu"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def absent(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} does not exist on a CPU; serve what needs it on a GPU")

    return absent
