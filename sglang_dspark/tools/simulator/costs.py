"""What simulated work takes: steps by a measured table, prefills by a line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sglang_dspark.scheduling.sps_table import LoadTimes, SpsTable
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
        table: what steps really take.
        prefill: of prompts.
        host_ms: of every step, on top of the table: scheduler, detokenising, sending.
        decision_ms: of every step of a policy that chooses lengths by itself, on top of that.
        noise: standard deviation of a step's time, in logarithms.
        plain_ms: ``(requests, milliseconds)`` of the plain step of another engine, ascending, instead of the table's;
            between them it is linear.
        believed: the step times that the scheduler has been told; None: ``table``. A planner that knows the truth picks
            the steps that a measured table flatters, and none of its errors.
        padded: whether attention computes as many rows for every request of a step as for the one that verifies most,
            as the plugin's attention on a CPU does.
    """

    table: SpsTable
    prefill: Prefill
    host_ms: float = 0.0
    noise: float = 0.0
    plain_ms: Sequence[tuple[int, float]] = ()
    believed: SpsTable | None = None
    padded: bool = False
    decision_ms: float = 0.0

    def step_ms(self, choice: Choice, requests: int, num_tokens: int, context: float, longest: int) -> float:
        """Milliseconds of one decode step, without noise.

        Args:
            num_tokens: tokens in the verify forward, anchors included.
            context: mean context tokens per request.
            longest: drafts of the request that verifies most.
        """
        if choice.depth == 0 and self.plain_ms:
            counts, plain_ms = zip(*self.plain_ms, strict=True)
            return float(np.interp(requests, counts, plain_ms))
        times = self.table.times(requests)
        column = times.room_for(num_tokens)
        beside = self.host_ms
        if self.padded:
            beside += _padding_ms(times, num_tokens, requests * (1 + longest), context)
        if choice.drafted is None:
            return beside + float(times.at(context, (choice.depth, column)))
        alone = self.table.times(len(choice.drafted)).at(context)
        drafting = float(alone[choice.depth, 0] - alone[0, 0])
        return beside + float(times.at(context, (0, column))) + drafting


def _padding_ms(times: LoadTimes, num_tokens: int, padded_tokens: int, context: float) -> float:
    """Attention of rows that are padding: the part of a step that grows with the context grows with the padded rows."""
    if len(times.contexts) < 2:
        return 0.0
    per_context_token = times.slope_ms[1, 0]
    padded, real = (per_context_token[times.room_for(tokens)] for tokens in (padded_tokens, num_tokens))
    return float(max(0.0, padded - real)) * context


def perturbed(table: SpsTable, error: float, seed: int) -> SpsTable:
    """``table`` with every cell off by a factor of its own.

    Args:
        error: standard deviation of the factors' logarithms.
    """
    rng = np.random.default_rng(seed)
    draft_ms, verify_ms = (
        values * np.exp(error * rng.standard_normal(values.shape)) for values in (table.draft_ms, table.verify_ms)
    )
    return replace(table, draft_ms=draft_ms, verify_ms=verify_ms)
