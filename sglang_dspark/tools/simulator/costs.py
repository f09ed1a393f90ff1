"""What simulated work takes: steps by a measured table, prefills by a line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sglang_dspark.scheduling.sps_table import SpsTable
from sglang_dspark.step.choice import Choice


@dataclass(frozen=True)
class Prefill:
    """A prefill takes ``batch_ms`` for its batch and ``token_ms`` for each of its tokens."""

    batch_ms: float
    token_ms: float

    @classmethod
    def from_table(cls, table: SpsTable) -> Prefill:
        """What the step times say about it.

        A batch costs as much as the plain step of one request, and a token what a verified token costs under the
        table's highest load, where rows are as many as they get.
        """
        plain, full = float(table.verify_ms[-1, 0, 0]), float(table.verify_ms[-1, -1, 0])
        tokens = table.requests[-1] * table.gamma
        return cls(float(table.verify_ms[0, 0, 0]), max(0.0, (full - plain) / tokens))

    def ms(self, tokens: int) -> float:
        """Milliseconds of one prefill batch."""
        return self.batch_ms + tokens * self.token_ms


@dataclass(frozen=True)
class Costs:
    """How long a server's work takes.

    Attributes:
        table: measured step times.
        prefill: of prompts.
        host_ms: of every step, on top of the table: scheduler, detokenising, sending.
        noise: standard deviation of a step's time, in logarithms.
        plain_ms: ``(requests, milliseconds)`` of the plain step of another engine, ascending, instead of the table's;
            between them it is linear.
    """

    table: SpsTable
    prefill: Prefill
    host_ms: float = 0.0
    noise: float = 0.0
    plain_ms: Sequence[tuple[int, float]] = ()

    def step_ms(self, choice: Choice, requests: int, num_tokens: int, context: float) -> float:
        """Milliseconds of one decode step, without noise.

        Args:
            num_tokens: tokens in the verify forward, anchors included.
            context: mean context tokens per request.
        """
        if choice.depth == 0 and self.plain_ms:
            counts, plain_ms = zip(*self.plain_ms, strict=True)
            return float(np.interp(requests, counts, plain_ms))
        times = self.table.times(requests)
        column = times.room_for(num_tokens)
        if choice.drafted is None:
            return self.host_ms + float(times.at(context, (choice.depth, column)))
        alone = self.table.times(len(choice.drafted)).at(context)
        drafting = float(alone[choice.depth, 0] - alone[0, 0])
        return self.host_ms + float(times.at(context, (0, column))) + drafting
