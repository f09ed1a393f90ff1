"""Ways from host to device and back without a wait: packed copies, events and times."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import cycle
from math import prod
from typing import Any

import torch
from dspark_kernels import to_device

WORD = torch.int32
"""What all of them are read as: the largest type that every one of them is a multiple of."""
# Results that may be on their way: of the step that is launched, of the one before, which the host waits for, and one
# for views that the engine still holds.
_DEPTH = 3


@dataclass(frozen=True)
class Packed:
    """Some tensors, one after the other in memory.

    Attributes:
        flat: [words] int32.
        shapes: type and shape of each.
        pinned: [at least as many words] memory of the host that they are to be copied to; None if they are there.
    """

    flat: torch.Tensor
    shapes: tuple[tuple[torch.dtype, torch.Size], ...]
    pinned: torch.Tensor | None = None

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], out: torch.Tensor | None = None) -> Packed:
        """Pack ``tensors``, in one launch if all are contiguous.

        Args:
            tensors: of types of four or eight bytes, those of eight first.
            out: [at least all words] int32, where they go; new memory by default.

        Raises:
            ValueError: ``out`` is too short.
        """
        words = [_words(tensor) for tensor in tensors]
        if out is not None:
            total = sum(map(len, words))
            if total > len(out):
                raise ValueError(f"{total} words are to be packed where there is room for {len(out)}")
            out = out[:total]
        return cls(torch.cat(words, out=out), tuple([(tensor.dtype, tensor.shape) for tensor in tensors]))

    def copy(self) -> Packed:
        """Start the copy in the current stream, and return where its result is going to be."""
        if self.pinned is None:
            return self
        flat = self.pinned[: len(self.flat)]
        flat.copy_(self.flat, non_blocking=True)
        return Packed(flat, self.shapes)

    def read(self) -> list[torch.Tensor]:
        """Return views of the tensors."""
        parts = zip(self.flat.split_with_sizes(_sizes(self.shapes)), self.shapes, strict=True)
        return [_as(part, dtype, shape) for part, (dtype, shape) in parts]

    def take(self) -> list[torch.Tensor]:
        """Return the tensors in memory of their own."""
        return Packed(self.flat.clone(), self.shapes).read()


@lru_cache
def _sizes(shapes: tuple[tuple[torch.dtype, torch.Size], ...]) -> list[int]:
    """Return the words of every tensor."""
    return [prod(shape) * dtype.itemsize // WORD.itemsize for dtype, shape in shapes]


def _as(words: torch.Tensor, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    part = words.view(dtype)
    return part if len(shape) == 1 else part.view(shape)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor if tensor.dim() == 1 else tensor.reshape(-1)
    # A column has a stride, and a lone element of one keeps it.
    return (flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)).view(WORD)


class PackedCopies:
    """Copies of packed tensors from a device to memory of the host that stays where it is.

    On a CPU there is nothing to copy, and every step gets memory of its own.

    Args:
        words: most that are packed.
        device: where they come from.
    """

    def __init__(self, words: int, device: torch.device) -> None:
        empty, num = partial(torch.empty, words, dtype=WORD), _DEPTH if device.type == "cuda" else 0
        self._turns = cycle([(empty(device=device), empty(pin_memory=True)) for _ in range(num)])

    def pack(self, tensors: Sequence[torch.Tensor]) -> Packed:
        """Pack ``tensors`` as :meth:`Packed.of` does; valid until two more were packed."""
        on_device, pinned = next(self._turns, (None, None))
        return replace(Packed.of(tensors, out=on_device), pinned=pinned)


def host_index(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """Return int64 of the values' shape on ``device``."""
    return to_device(torch.tensor(values, dtype=torch.int64), device)


def host_floats(values: Sequence[float], device: torch.device) -> torch.Tensor:
    """Return [n] float32 on ``device``."""
    return to_device(torch.tensor(values, dtype=torch.float32), device)


def copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy without waiting; the source stays allocated until the current stream has read it."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return host


# Spans that may not have been read: of the step that is launched, of the one before, and one to spare.
_SPANS = 3


class DeviceSpan:
    """Two events around what is launched between them in the current stream; off a GPU they are None."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._events = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) if on_gpu else None

    def begin(self) -> None:
        """Count what is launched from here on."""
        if self._events is not None:
            self._events[0].record()

    def end(self) -> None:
        """Count what was launched until here."""
        if self._events is not None:
            self._events[1].record()

    @property
    def ms(self) -> float | None:
        """Return the milliseconds; None off a GPU, and while the device is not done."""
        if self._events is None or not self._events[1].query():
            return None
        return float(self._events[0].elapsed_time(self._events[1]))


class DeviceTimer:
    """Spans that take turns: one may be read until two more have begun."""

    def __init__(self, device: torch.device) -> None:
        self._spans = cycle([DeviceSpan(device) for _ in range(_SPANS)])

    def begin(self) -> DeviceSpan:
        """Return the span of the step that is about to be launched."""
        span = next(self._spans)
        span.begin()
        return span


class AwaitedEvent:
    """An event of a device that knows how long it was waited for; everything else is its own."""

    def __init__(self, event: Any) -> None:
        self._event = event
        self.waited_ms = 0.0

    def synchronize(self) -> None:
        """Wait for the event."""
        began = time.perf_counter()
        self._event.synchronize()
        self.waited_ms += (time.perf_counter() - began) * 1e3

    def __getattr__(self, name: str) -> Any:
        return getattr(self._event, name)
