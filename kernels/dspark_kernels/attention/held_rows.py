"""Rows of plain steps, held back until the draft K/V of many of them is computed at once.

A plain step commits a row per request. What projects it is read once per product, whatever the rows: 252 MB of a
Qwen3-8B drafter. To hold a row back moves it once, 41 KB there.

Bytes: 2 * n * (w * sizeof(features) + 16).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from dspark_kernels.dispatch import on_kernels

_BLOCK = 2048


@dataclass(frozen=True)
class HeldRows:
    """A ring of target rows in the order in which they came.

    Attributes:
        features: [capacity, w] that draft K/V is projected from.
        positions, slots: [capacity] int64 of these, as :func:`kv_inject` takes them.
        end: [1] int64, rows that have come; the next one goes to this place, or as far behind the ring's beginning.
    """

    features: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    end: torch.Tensor

    @classmethod
    def empty(cls, capacity: int, width: int, dtype: torch.dtype, device: torch.device | str) -> HeldRows:
        """Return a ring without rows."""
        numbers = torch.zeros((3, capacity), dtype=torch.int64, device=device)
        features = torch.zeros((capacity, width), dtype=dtype, device=device)
        return cls(features, numbers[0], numbers[1], numbers[2, :1])

    def first(self, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return features, positions and slots of the first rows."""
        return self.features[:number], self.positions[:number], self.slots[:number]


def hold_rows_ref(features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, held: HeldRows) -> None:
    """Compute the same as :func:`hold_rows` in plain torch. No host sync."""
    places = (held.end + torch.arange(len(slots), device=slots.device)) % len(held.slots)
    held.features[places] = features
    held.positions[places], held.slots[places] = positions.long(), slots.long()
    held.end.add_(len(slots))


@triton.jit(do_not_specialize_on_alignment=["features_ptr", "positions_ptr", "slots_ptr"])
def _hold_rows_kernel(
    features_ptr,  # rows features_stride apart
    features_stride,
    positions_ptr,
    slots_ptr,
    end_ptr,
    held_features_ptr,
    held_positions_ptr,
    held_slots_ptr,
    capacity,
    width,
    BLOCK: tl.constexpr,
):
    row, part = tl.program_id(0), tl.program_id(1)
    place = (tl.load(end_ptr) + row) % capacity
    columns = part * BLOCK + tl.arange(0, BLOCK)
    in_row = columns < width
    features = tl.load(features_ptr + row.to(tl.int64) * features_stride + columns, mask=in_row)
    tl.store(held_features_ptr + place * width + columns, features, mask=in_row)
    if part == 0:
        tl.store(held_positions_ptr + place, tl.load(positions_ptr + row).to(tl.int64))
        tl.store(held_slots_ptr + place, tl.load(slots_ptr + row).to(tl.int64))


@on_kernels(hold_rows_ref)
def hold_rows(
    features: torch.Tensor,  # [n, w]
    positions: torch.Tensor,  # [n] int
    slots: torch.Tensor,  # [n] int
    held: HeldRows,
) -> None:
    """Append rows to those that are held. No host sync; safe under graph capture: the device knows where they go.

    Args:
        features: contiguous rows, which may lie apart; not more of them than the ring holds.

    Raises:
        ValueError: rows of another width or dtype, or too many.
    """
    (num_rows, width), capacity = features.shape, len(held.slots)
    if width != held.features.shape[1] or features.dtype != held.features.dtype or num_rows > capacity:
        raise ValueError(
            f"features {list(features.shape)} of {features.dtype} do not fit: expected up to {capacity} rows of "
            f"{held.features.shape[1]} numbers of {held.features.dtype}"
        )
    if num_rows == 0:
        return
    _hold_rows_kernel[(num_rows, triton.cdiv(width, _BLOCK))](
        features,
        features.stride(0),
        positions,
        slots,
        held.end,
        held.features,
        held.positions,
        held.slots,
        capacity,
        width,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    held.end.add_(num_rows)
