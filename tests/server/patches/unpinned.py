"""Ordinary memory where SGLang wants pinned memory for adapters, which PyTorch has only with a GPU."""

import functools

import torch

MAKERS = ("arange", "empty", "full", "ones", "tensor", "zeros")


def install(_module):
    """Let ``pin_memory`` be without effect; does nothing on a machine with a GPU."""
    if torch.cuda.is_available():
        return
    for name in MAKERS:
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *device: tensor


def unpinned(make):
    """Return ``make`` without its argument ``pin_memory``."""

    @functools.wraps(make)
    def function(*args, pin_memory=False, **kwargs):
        return make(*args, **kwargs)

    return function
