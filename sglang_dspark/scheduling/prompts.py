"""Rows of prompts beside requests that run: how many a step may have, and which of them are verified like drafts."""

from collections.abc import Sequence

from sglang_dspark.scheduling.sps_table import SpsTable

# Rows of the first chunk beside running requests, whose time nothing is known about, and of the shortest one: few rows
# take hardly less time than these, and prompts would take for ever.
_FIRST, _LEAST = 64, 32
# What a chunk is cut to, of the bound, and how much longer than the last one it may be. A row of the next chunk costs
# more than one of the last: its context is longer, by the last chunk and by its own.
_SHARE, _GROWTH = 0.8, 1.5
# By how much a prefill of few rows takes longer than a captured verification of one: guessed from an 8B target on an
# H200, where they took 5 to 9 ms, and 5. And how many rows take hardly longer than one, where times are not known.
_PREFILL, _UNTIMED_ROWS = 1.5, 128


class ChunkLimit:
    """Says how many rows a step may have that encodes prompts.

    How long a row takes depends on the machine, the target and the context, so it follows from the steps that have been
    timed. At the rate of the last full chunk, as many rows as a time has room for take that time or less: what a step
    takes beside its rows is counted as if it grew with them.

    Args:
        bound_ms: of a step.

    Attributes:
        rows: that it may have.
    """

    def __init__(self, bound_ms: float) -> None:
        self._target_ms = _SHARE * bound_ms
        self.rows = _FIRST

    def beside(self, running: int) -> int:
        """Return the rows of a step beside so many requests, each of which has one of them."""
        return max(self.rows, running + _LEAST)

    def learn(self, rows: int, ms: float) -> None:
        """Take the milliseconds of a step of so many rows."""
        fitting = int(rows * self._target_ms / max(ms, 1e-3))
        if ms > self._target_ms:
            self.rows = max(_LEAST, min(self.rows, fitting))
        elif 2 * rows > self.rows:  # few rows say little: the most of their time is not theirs
            self.rows = max(self.rows, min(fitting, int(_GROWTH * max(rows, self.rows))))


def most_rows(tiers: Sequence[int], table: SpsTable | None, width: int) -> int:
    """Return the rows up to which a verification takes no longer than a prefill.

    Args:
        tiers: rows of captured verifications, ascending.
        table: of step times; None if they were not measured.
        width: the most rows of a request.
    """
    if table is None:
        return _UNTIMED_ROWS
    prefill_ms = _PREFILL * table.step_ms(1, 1, 0, 0.0)
    return max((rows for rows in tiers if table.step_ms(-(-rows // width), rows, 0, 0.0) <= prefill_ms), default=0)
