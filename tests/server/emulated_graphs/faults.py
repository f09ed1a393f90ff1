"""Kernels and graphs that are wrong on purpose, for the self-check to find."""

import functools
import os

GRAPH = "a CUDA graph"
VARIABLE = "PLANTED_KERNEL_FAULT"
"""Names the kernel, or the graphs, that are wrong in a server."""


def planted(name):
    """Return whether this server has the fault of that name."""
    return os.environ.get(VARIABLE) == name


def faulty(function, ran=None):
    """Return the kernels of a function with a fault in the last number of their result, or of the row that they write.

    An integer is larger by one, another number by a tenth of the largest one.

    Args:
        ran: gets the function's name when they run.
    """
    from sglang_dspark.worker.kernel_comparison import tensors_of

    @functools.wraps(function.kernel)
    def run(*args, original=function.kernel, **given):
        result = original(*args, **given)
        if ran is not None:
            ran.append(function.kernel.__name__)
        if result is None:
            pool, slot = given["pool"][0], given["slots"][-1].long()
            pool[:, slot] += 0.1 * pool[:, slot].abs().max()
            return None
        wrong = next(tensor for tensor in tensors_of(result) if tensor.numel())
        wrong.view(-1)[-1:].add_(0.1 * wrong.abs().max() if wrong.is_floating_point() else 1)
        return result

    return run
