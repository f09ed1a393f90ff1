"""Stands in for SGLang's kernel package where there is no GPU, whose library is not there to be loaded.

SGLang imports these names as soon as it serves on a CPU. Of DSPARK's servers and of plain ones none is called but the
first; the others belong to other ways of speculation.
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
        raise NotImplementedError(f"sgl_kernel.{name} is not there on this machine")

    return absent
