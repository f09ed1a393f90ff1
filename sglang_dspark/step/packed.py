"""Tensors side by side in one: what a step brings to the host comes with one copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod

import torch

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


@dataclass
class PackedCopies:
    """Copies of packed tensors from a device to memory of the host that stays where it is.

    On a CPU there is nothing to copy, and every step gets memory of its own.

    Args:
        words: most that are packed.
        device: where they come from.
    """

    words: int
    device: torch.device
    _turn: int = 0
    _rings: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.device.type == "cuda":
            for _ in range(_DEPTH):
                on_device = torch.empty(self.words, dtype=WORD, device=self.device)
                self._rings.append((on_device, torch.empty(self.words, dtype=WORD, pin_memory=True)))

    def pack(self, tensors: Sequence[torch.Tensor]) -> Packed:
        """Pack ``tensors`` as :meth:`Packed.of` does; valid until two more were packed."""
        if not self._rings:
            return Packed.of(tensors)
        self._turn = (self._turn + 1) % _DEPTH
        on_device, pinned = self._rings[self._turn]
        return replace(Packed.of(tensors, out=on_device), pinned=pinned)
