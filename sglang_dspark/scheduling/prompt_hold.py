"""When the next prompts may be encoded: a prefill interrupts everybody who decodes."""

from __future__ import annotations

from collections.abc import Callable


class PromptHold:
    """After a prefill, decoding runs for as long as that prefill took before the next one starts.

    So decoding gets at least half of the time, and prompts that come one by one are encoded together. Nobody is held
    back where nothing runs, and nobody for longer than ``most_s``.

    Args:
        most_s: most seconds that waiting prompts are held back at a time; 0 never holds any.
        lag: steps that the device may be behind when the next one is launched: a prefill lasts until the launch so many
            after the next.
        clock: seconds.
    """

    def __init__(self, most_s: float, lag: int, clock: Callable[[], float]) -> None:
        self._most_s, self._lag, self._clock = most_s, lag, clock
        self._launched_at = 0.0
        self._open = 0  # launches that the last prefills still last for
        self._periods: list[float] = []  # between launches, since the first of these prefills
        self._owed_s = 0.0
        self._held_since: float | None = None

    @property
    def is_on(self) -> bool:
        """Whether prompts are ever held."""
        return self._most_s > 0

    def launched(self, *, prefill: bool) -> None:
        """A prefill or a decode step is being launched."""
        if not self.is_on:
            return
        now = self._clock()
        elapsed, self._launched_at = now - self._launched_at, now
        if self._open:
            self._periods.append(elapsed)
            self._open -= 1
            if not self._open and not prefill:
                self._owed_s += self._took()
                self._periods = []
        else:
            self._owed_s = max(0.0, self._owed_s - elapsed)
        if prefill:
            self._open = self._lag + 1
            self._held_since = None

    def holds(self, running: int) -> bool:
        """Whether prompts that wait now go on waiting.

        Args:
            running: requests that decode.
        """
        if running == 0 or not self.is_on:
            self._open, self._periods, self._owed_s = 0, [], 0.0
            return False
        now = self._clock()
        if not self._open and self._owed_s <= now - self._launched_at:
            self._held_since = None
            return False
        if self._held_since is None:
            self._held_since = now
        return now - self._held_since < self._most_s

    def _took(self) -> float:
        """Seconds of the prefills that are over: their number of periods, late by as much as the host was ahead."""
        number = len(self._periods) - self._lag
        return max(sum(self._periods[:number]), sum(self._periods[self._lag :]))
