"""How long the rest of a sweep will take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from serving.load import Load
from serving.schedule import Cell


class RemainingTime:
    """Predicts the cells that are left from those that are done.

    The duration of a cell is taken as proportional to its prompts: what it took per prompt is known from the same
    configuration at the same load, else from the others at that load, else from answers at other numbers of users,
    which take about as long. In an open loop the arrivals alone tell.
    """

    def __init__(self, num_prompts: Callable[[Cell], int]) -> None:
        """Start without any knowledge; ``num_prompts`` tells how many prompts a cell has."""
        self._num_prompts = num_prompts
        self._seen: list[tuple[str, Load, float]] = []

    def note(self, cell: Cell, seconds: float) -> None:
        """Learn that ``cell`` took so long."""
        self._seen.append((cell.configuration.label, cell.load, seconds / self._waves(cell)))

    def predict(self, cells: Sequence[Cell]) -> float | None:
        """Seconds that ``cells`` will take; None while nothing is known."""
        total_s = 0.0
        for cell in cells:
            per_wave_s = self._per_wave_s(cell)
            if per_wave_s is None:
                return None
            total_s += per_wave_s * self._waves(cell)
        return total_s

    def _waves(self, cell: Cell) -> float:
        """Answers that one user waits for; in an open loop the seconds until the last arrival."""
        return self._num_prompts(cell) / (cell.load.concurrency or cell.load.rate or 1)

    def _per_wave_s(self, cell: Cell) -> float | None:
        at_load = [(label, s) for label, load, s in self._seen if load == cell.load]
        own = [s for label, s in at_load if label == cell.configuration.label]
        if own or at_load:
            return fmean(own or [s for _, s in at_load])
        if cell.load.rate is not None:
            return 1.0
        closed = [s for _, load, s in self._seen if load.rate is None]
        return fmean(closed) if closed else None


def in_words(seconds: float | None) -> str:
    """``seconds`` as a progress bar shows them."""
    if seconds is None:
        return "remaining time not yet known"
    return f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"about {seconds:.0f} s left"
