"""Makes arguments of functions that have kernels, with padding after what is real, and lists the calls."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from recurrent_rows import Rows

GARBAGE = {torch.int64: 2**40 + 7, torch.int32: 2**30 + 7}  # in padding


class Made(Rows):
    """Makes the arguments of one call, the same ones each time.

    Args:
        fill: what floating-point numbers of padding are; None for what the generator gives.

    Attributes:
        given: random numbers, each with a copy.
    """

    def __init__(self, device, dtype=torch.float32, fill=None):
        super().__init__(device, dtype, seed=5)
        self.fill, self.given = fill, []

    def rand(self, *shape, dtype=None, real=None):
        """Random numbers, of which the first ``real`` along the first dimension are no padding."""
        made = self.spoilt(super().rand(*shape, dtype=dtype), real)
        self.given.append((made, made.clone()))
        return made

    @staticmethod
    def room(rows):
        """Return how many rows a call has next to so many real ones: none is padding where there are none."""
        return rows + 2 if rows else 0

    def numbers(self, *shape, most, real=None):
        """Likewise integers below ``most``."""
        return self.spoilt(torch.randint(most, shape, generator=self._generator).to(self.device), real)

    def spoilt(self, tensor, real):
        """``tensor`` with padding from ``real`` on; as it is where ``real`` is None."""
        if real is not None and self.fill is not None:
            tensor[real:] = self.fill if tensor.is_floating_point() else GARBAGE[tensor.dtype]
        return tensor

    def pool(self, owned, *shape, slots=40):
        """Numbers of which only the slots ``owned`` belong to a request."""
        pool = super().rand(slots, *shape, dtype=torch.float32)
        if self.fill is not None:
            pool[[slot for slot in range(slots) if slot not in owned]] = self.fill
        return pool


@dataclass(frozen=True)
class Case:
    """The calls of one function.

    Attributes:
        call: ``call(form, made, *size)``.
        sizes: the first one is called with spoilt padding, and all of them by both forms.
        dtypes: of what is random.
        tolerance: by dtype; others are equal except for rounding.
        in_place: whether some of what is given is written to.
    """

    call: Callable[..., list[torch.Tensor]]
    sizes: tuple[tuple[Any, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    tolerance: dict[torch.dtype, dict[str, float]]
    in_place: bool


CASES: dict[str, Case] = {}


def case(*sizes, dtypes=(torch.float32,), tolerance=None, in_place=False):
    """Register a function's call under the name of the function."""

    def register(call):
        CASES[call.__name__] = Case(call, sizes or ((),), tuple(dtypes), tolerance or {}, in_place)
        return call

    return register
