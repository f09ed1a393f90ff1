"""Time simulated work: steps by a measured table, prefills by a line."""

from dataclasses import dataclass
from typing import Self

from sglang_dspark.scheduling.policies import Beside
from sglang_dspark.scheduling.sps_table import LoadTimes, SpsTable
from sglang_dspark.step.decision import StepDecision


@dataclass(frozen=True)
class Prefill:
    """A prefill takes ``batch_ms`` for its batch, and ``token_ms`` for each of its tokens.

    For each token before it, to which it attends, a token takes ``context_ms`` more.
    """

    batch_ms: float
    token_ms: float = 0.0
    context_ms: float = 0.0

    @classmethod
    def from_table(cls, table: SpsTable) -> Self:
        """Take it from the step times, without the context.

        A batch costs as much as the plain step of one request, and a token what a verified token costs under the
        table's highest load, where rows are as many as they get.
        """
        plain, full = float(table.verify_ms[-1, 0, 0]), float(table.verify_ms[-1, -1, 0])
        tokens = table.requests[-1] * table.gamma
        return cls(float(table.verify_ms[0, 0, 0]), max(0.0, (full - plain) / tokens))

    def ms(self, tokens: int, attended: int = 0) -> float:
        """Return the milliseconds of one prefill batch, whose tokens attend to so many tokens together."""
        return self.batch_ms + tokens * self.token_ms + attended * self.context_ms


@dataclass(frozen=True)
class Costs:
    """The times of a server's work.

    Attributes:
        table: what steps really take.
        prefill: of prompts.
        noise: standard deviation of a step's time, in logarithms.
        believed: the step times that the scheduler has been told; None: ``table``. A planner that knows the truth picks
            the steps that a measured table flatters, and none of its errors.
    """

    table: SpsTable
    prefill: Prefill
    noise: float = 0.0
    believed: SpsTable | None = None

    def step_ms(
        self,
        decision: StepDecision,
        requests: int,
        num_tokens: int,
        context: float,
        longest: int,
        beside: Beside | None = None,
    ) -> float:
        """Return the milliseconds of one decode step, without noise.

        A table without tiers is a CPU's, where the plugin's attention computes as many rows for every request as for
        the one that verifies most.

        Args:
            num_tokens: tokens in the verify forward, anchors included.
            context: mean context tokens per request.
            longest: drafts of the request that verifies most.
            beside: further rows of the forward; None if there are none.
        """
        beside = beside or Beside(0, 0, 0.0)
        verified, joined_context = (
            self.table.times(requests + beside.requests),
            beside.joined_context(requests, context),
        )
        ms = float(verified.at(joined_context, (0, verified.room_for(num_tokens + beside.rows))))
        if not self.table.tiers:
            ms += _padding_ms(self.table.times(requests), num_tokens, requests * (1 + longest), context)
        drafted = requests if decision.draft_requests is None else len(decision.draft_requests)
        drafting = self.table.times(drafted).at(context)[:, 0]
        return ms + float(drafting[decision.draft_len] - drafting[0])


def _padding_ms(times: LoadTimes, num_tokens: int, padded_tokens: int, context: float) -> float:
    """Return the attention of padding: the part of a step that grows with the context grows with padded rows."""
    if len(times.contexts) < 2:
        return 0.0
    per_context_token = times.slope_ms[1, 0]
    padded, real = (per_context_token[times.room_for(tokens)] for tokens in (padded_tokens, num_tokens))
    return float(max(0.0, padded - real)) * context
