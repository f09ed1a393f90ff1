"""Counts what a decode step launches on a GPU: graphs, kernels of ours, and operations of torch outside of both."""

import logging
from collections import Counter
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode

logger = logging.getLogger(__name__)

aten = torch.ops.aten
# Memory and numbers of the host: nothing is launched.
FREE = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.detach.default,
    aten._local_scalar_dense.default,
    aten._unsafe_view.default,
}

_state = {"depth": 0}
_counts = Counter()


class _Count(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not _state["depth"] and func not in FREE and not func.is_view:
            _counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def one(kind):
    """Count one launch of this kind, and none of those inside it."""
    if not _state["depth"]:
        _counts[kind] += 1
    _state["depth"] += 1
    try:
        yield
    finally:
        _state["depth"] -= 1


@contextmanager
def counting(what):
    """Write what was launched inside to the log, and yield the counts."""
    _counts.clear()
    with _Count():
        yield _counts
    operations = {name: count for name, count in _counts.items() if name not in ("graph", "kernel")}
    logger.warning(
        "launched by %s: %d graphs, %d kernels, %d operations: %s",
        what,
        _counts["graph"],
        _counts["kernel"],
        sum(operations.values()),
        operations,
    )
