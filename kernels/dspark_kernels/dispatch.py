"""The choice between kernels on a GPU and references in plain torch elsewhere. Callers never ask.

The rule: kernels run if the first tensor of the arguments is on CUDA, or everywhere inside :func:`kernels_anywhere`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_anywhere: list[None] = []  # one entry per `kernels_anywhere` that is entered


class Dispatched(Generic[P, R]):
    """A function in two forms, which take the same arguments and give the same result.

    Attributes:
        kernel: the form for a GPU.
        reference: the form for everything else.
    """

    def __init__(self, kernel: Callable[P, R], reference: Callable[P, R]) -> None:
        self.kernel, self.reference = kernel, reference
        update_wrapper(self, kernel)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the form that the arguments' device calls for."""
        tensors = (found for value in (*args, *kwargs.values()) if (found := _tensor_of(value)) is not None)
        form = self.kernel if runs_kernels(next(tensors, None)) else self.reference
        return form(*args, **kwargs)


def on_kernels(reference: Callable[P, R]) -> Callable[[Callable[P, R]], Dispatched[P, R]]:
    """Decorate the form with kernels: everything that is not on a GPU goes to ``reference``."""
    return lambda kernel: Dispatched(kernel, reference)


def runs_kernels(tensor: torch.Tensor | None) -> bool:
    """Return whether kernels run for this tensor, for callers that arrange other things around them."""
    return bool(_anywhere) or (tensor is not None and tensor.is_cuda)


@contextmanager
def kernels_anywhere() -> Iterator[None]:
    """Inside, kernels run wherever tensors are: under Triton's interpreter, or compiled without being launched."""
    _anywhere.append(None)
    try:
        yield
    finally:
        _anywhere.pop()


def _tensor_of(value: Any) -> torch.Tensor | None:
    """``value`` itself, or the first tensor that it holds."""
    if isinstance(value, torch.Tensor):
        return value
    if is_dataclass(value):
        parts = (_tensor_of(getattr(value, field.name)) for field in fields(value))
        return next((part for part in parts if part is not None), None)
    return None
