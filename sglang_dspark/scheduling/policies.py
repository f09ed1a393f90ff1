"""The verify policies except ``auto``: each makes a :class:`StepDecision` before anything is drafted.

It also says how many rows a step with prompts may have, and which prompts are verified like drafts.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from sglang_dspark.scheduling.sps_table import SpsTable
from sglang_dspark.scheduling.step_times import StepTimes
from sglang_dspark.step.decision import PLAIN, StepDecision
from sglang_dspark.step.selection import EarlyStop, FixedLength, Threshold


class ExtraRows(NamedTuple):
    """Rows that a step verifies whatever it decides, such as those of prompts.

    Attributes:
        requests: as which they are laid out.
        rows: how many.
        context: mean tokens before each of the requests.
        bound_ms: of the step, as far as drafts are left out for it.
    """

    requests: int
    rows: int
    context: float
    bound_ms: float = inf

    def joined_context(self, requests: int, context: float) -> float:
        """Return the mean tokens before its requests and so many others, which have a mean of ``context``."""
        return (requests * context + self.requests * self.context) / (requests + self.requests)


class Policy(ABC):
    """Decides what a step does.

    Attributes:
        name: as in the flag and in reports.
        needs_confidence: whether the drafter's confidences have to be computed.
        parked: whether the server drafts nothing because non-speculative steps are faster.
    """

    name: str
    needs_confidence: bool
    parked: bool = False

    @abstractmethod
    def choose(self, requests: int, context: float, extra: ExtraRows | None = None) -> StepDecision:
        """Decide a step of ``requests`` requests with ``context`` tokens of context each on average.

        Args:
            extra: further rows of its verification, whose time a policy may count.
        """

    def report(self) -> dict[str, Any]:
        """Return JSON for the statistics."""
        return {}

    def can_spend(self, request: str, decision: StepDecision, context: float) -> bool:
        """Return whether a request that runs alone may take the step that was decided; if not, it takes a plain one."""
        return True


@dataclass
class FixedPolicy(Policy):
    """``static``: the same number of drafts for every request in every step; ``off``, or no drafter: none."""

    verify_len: int
    name: str = "static"
    needs_confidence: bool = False

    def choose(self, requests: int, context: float, extra: ExtraRows | None = None) -> StepDecision:
        return StepDecision(self.verify_len, FixedLength()) if self.verify_len else PLAIN

    def report(self) -> dict[str, Any]:
        return {"verify_len": self.verify_len}


@dataclass
class ThresholdPolicy(Policy):
    """``threshold``: drafts whole blocks, and verifies them up to the first draft of low confidence."""

    gamma: int
    threshold: float
    name: str = "threshold"
    needs_confidence: bool = True

    def choose(self, requests: int, context: float, extra: ExtraRows | None = None) -> StepDecision:
        return StepDecision(self.gamma, Threshold(self.threshold))

    def report(self) -> dict[str, Any]:
        return {"confidence_threshold": self.threshold}


@dataclass
class EarlyStopPolicy(Policy):
    """``early-stop``: drafts whole blocks, from which Algorithm 1 of DSpark selects according to the confidences."""

    gamma: int
    times: StepTimes
    name: str = "early-stop"
    needs_confidence: bool = True

    def choose(self, requests: int, context: float, extra: ExtraRows | None = None) -> StepDecision:
        step_ms = self.times.by_drafts(requests, self.gamma, context)
        return StepDecision(self.gamma, EarlyStop(tuple(step_ms.tolist())))


# Rows of the shortest chunk with running requests: fewer take hardly less time, and prompts would take for ever. The
# first chunk is as short: nothing is known yet about the time of longer ones.
LEAST_ROWS = 8
# What a chunk is cut to, of the bound, and how much longer than the last one it may be. A row of the next chunk costs
# more than one of the last: its context is longer, by the last chunk and by its own.
_SHARE, _GROWTH = 0.8, 1.5
# What a prefill takes longer than a captured verification of its rows, in non-speculative steps of one request: guessed
# from an 8B target on an H200, where prompts of 100 tokens took 5 to 9 ms, and non-speculative steps 5. And how many
# rows take hardly longer than one, where times are not known.
_LAUNCHED, _UNTIMED_ROWS = 0.5, 128


class ChunkLimit:
    """Says how many rows a step may have that encodes prompts.

    How long a row takes depends on the machine, the target and the context, so it follows from the steps that have been
    timed. At the rate of the last full chunk, as many rows as a time has room for take that time or less: what a step
    takes in addition to its rows is counted as if it grew with them.

    Args:
        bound_ms: of a step.

    Attributes:
        rows: that it may have.
    """

    def __init__(self, bound_ms: float) -> None:
        self._target_ms = _SHARE * bound_ms
        self.rows = LEAST_ROWS

    def rows_with(self, running: int) -> int:
        """Return the rows of a step with so many running requests, each of which has one of them."""
        return max(self.rows, running + LEAST_ROWS)

    def learn(self, rows: int, ms: float, *, drafted: bool = False) -> None:
        """Take the milliseconds of a step of so many rows.

        Args:
            drafted: whether drafts of other requests took a part of them; more rows may fit then, but no fewer.
        """
        fitting = int(rows * self._target_ms / max(ms, 1e-3))
        if ms > self._target_ms:
            if not drafted:
                self.rows = max(LEAST_ROWS, min(self.rows, fitting))
        elif 2 * rows > self.rows:  # few rows say little: the most of their time is not theirs
            self.rows = max(self.rows, min(fitting, int(_GROWTH * max(rows, self.rows))))


def least_gap_ms(times: StepTimes, rows: int) -> float:
    """Return the milliseconds of a step that encodes so many rows next to one request, at the machine's speed now."""
    table, step_rows = times.table, rows + 1
    requests = -(-step_rows // (table.gamma + 1))
    return table.step_ms(requests, step_rows, 0, 0.0) * times.common_factor


def verified_sooner(table: SpsTable | None, requests: int, rows: int, context: float) -> bool:
    """Return whether a captured verification of prompts takes no longer than a prefill of them.

    Both compute as many rows. To launch a prefill takes time, as does attention that reads a context once per request.

    Args:
        table: of step times; None if they were not measured.
        requests: as which the prompts are laid out.
        context: mean tokens before each of these.
    """
    if table is None:
        return rows <= _UNTIMED_ROWS
    read_ms = table.step_ms(requests, rows, 0, context) - table.step_ms(requests, rows, 0, 0.0)
    return read_ms <= _LAUNCHED * table.step_ms(1, 1, 0, 0.0)
