"""Stand in for SGLang's kernel package, which is built for CUDA alone, where there is no GPU.

SGLang imports its names ending in ``_cpu`` as soon as it starts on a CPU. Plain servers and servers with DSPARK call
none but the first; the others belong to other speculative algorithms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__version__ = "0"


def assign_req_to_token_pool_cpu(
    req_pool_indices: Any, req_to_token: Any, start: Any, end: Any, slots: Any, *_: Any
) -> None:
    """Enter ``slots``, request by request, into the columns ``start`` to ``end`` of each request's row."""
    taken = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        req_to_token[row, first:last] = slots[taken : taken + last - first].to(req_to_token.dtype)
        taken += last - first


def __getattr__(name: str) -> Callable[..., Any]:
    if not name.endswith("_cpu"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def absent(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} does not exist on a CPU; serve what needs it on a GPU")

    return absent
