"""Decides whether kernels or their references run, and knows properties of the GPU that launches need.

Callers never ask: kernels run if the first tensor of the arguments is on CUDA, or everywhere inside
:func:`kernels_anywhere`. On other devices, the properties suit Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_anywhere: list[None] = []  # one entry per `kernels_anywhere` that is entered
_observers: list[Callable[[Dispatched[Any, Any], tuple[Any, ...], dict[str, Any]], None]] = []


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
        if not runs_kernels(_first_tensor((*args, *kwargs.values()))):
            return self.reference(*args, **kwargs)
        result = self.kernel(*args, **kwargs)
        for observe in tuple(_observers):
            observe(self, args, kwargs)
        return result


def on_kernels(reference: Callable[P, R]) -> Callable[[Callable[P, R]], Dispatched[P, R]]:
    """Decorate the form with kernels: everything that is not on a GPU goes to ``reference``."""
    return lambda kernel: Dispatched(kernel, reference)


def runs_kernels(tensor: torch.Tensor | None) -> bool:
    """Return whether kernels run for this tensor, for callers that arrange other things around them."""
    return bool(_anywhere) or (tensor is not None and tensor.is_cuda)


@contextmanager
def kernels_anywhere() -> Iterator[None]:
    """Run kernels in the block wherever tensors are: under Triton's interpreter, or compiled without being launched."""
    _anywhere.append(None)
    try:
        yield
    finally:
        _anywhere.pop()


@contextmanager
def observed(observe: Callable[[Dispatched[Any, Any], tuple[Any, ...], dict[str, Any]], None] | None) -> Iterator[None]:
    """Show ``observe`` every call in the block that has launched kernels; None shows it to nobody."""
    before = tuple(_observers)
    _observers[:] = [] if observe is None else [observe]
    try:
        yield
    finally:
        _observers[:] = before


def _first_tensor(values: Iterable[Any]) -> torch.Tensor | None:
    """The first of ``values`` that is a tensor, or the first tensor that a dataclass among them holds."""
    for value in values:
        if isinstance(value, torch.Tensor):
            return value
        if hasattr(value, "__dataclass_fields__") and (found := _first_tensor(vars(value).values())) is not None:
            return found
    return None


_INTERPRETED_PROCESSORS = 2  # enough to see work shared out unevenly
_INTERPRETED_SHARED_BYTES = 232_448  # as an H100 has


@cache
def num_processors(device: torch.device) -> int:
    """Return the number of multiprocessors of the GPU."""
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def shared_bytes(device: torch.device) -> int:
    """Return the shared memory of a program in bytes: 99 KB on an L4 or an RTX 4090, over twice that on an H100."""
    if device.type != "cuda":
        return _INTERPRETED_SHARED_BYTES
    properties: Any = torch.cuda.get_device_properties(device)  # the stub lacks the attribute
    return int(properties.shared_memory_per_block_optin)
