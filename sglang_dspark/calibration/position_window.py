"""The most recent values at every position of the block."""

import numpy as np

from sglang_dspark.calibration.survival import Bools, Floats


class PositionWindow:
    """One ring buffer per position, all filled at once.

    Positions fill at different speeds: a draft is only seen where all before it were accepted.

    Attributes:
        values: one [gamma, capacity] float64 array per field, in no particular order along a row.
        filled: [gamma] how many of the first entries of a row hold values; the others are 0.
        seen: [gamma] values ever appended.
    """

    def __init__(self, gamma: int, capacity: int, num_fields: int) -> None:
        self.values = [np.zeros((gamma, capacity)) for _ in range(num_fields)]
        self.seen = np.zeros(gamma, dtype=np.int64)
        self._capacity = capacity
        self._row_starts = np.arange(gamma) * capacity

    @property
    def filled(self) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        return np.minimum(self.seen, self._capacity)

    def append(self, mask: Bools, *fields: Floats | Bools) -> None:
        """Add the entries where ``mask`` is set, oldest row first.

        Args:
            mask: [n, gamma]
            fields: one [n, gamma] array per field.
        """
        order = np.cumsum(mask, axis=0) - 1
        counts = mask.sum(axis=0)
        # Of more entries than fit, the oldest would be overwritten in an undefined order.
        newest = mask & (order >= counts - self._capacity)
        slots = (self._row_starts + (self.seen + order) % self._capacity)[newest]
        for stored, added in zip(self.values, fields, strict=True):
            stored.reshape(-1)[slots] = added[newest]
        self.seen += counts
