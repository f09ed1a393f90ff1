"""Rows of a verification in which each request has its own number."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from dspark_kernels import StepRequests, VerifyRows
from sglang.kernels.ops.speculative.dspark.dspark_verify_window import RaggedVerifyWindow
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout, round_up_grid

from sglang_dspark.engine.sglang_types import ModelRunner
from sglang_dspark.step.decision import StepDecision
from sglang_dspark.step.selected import FixedLens, SelectedDrafts, build_plan
from sglang_dspark.step.state import VerifyPlan


class PlannedLayout(RaggedVerifyLayout):
    """A layout with the rows themselves, which the plan of a step has written with it.

    Attributes:
        window: what SGLang would make of the layout, in a dozen launches more.
    """

    window: RaggedVerifyWindow | None = None


@dataclass(frozen=True)
class CapturedRows:
    """The sizes of verifications that are captured as CUDA graphs.

    Attributes:
        window: the most rows of a request, its anchor included.
        tiers: rows of the captured forwards, ascending; empty where none is captured, and any number will do.
        requests: most requests of a captured forward.
    """

    window: int
    tiers: Sequence[int] = ()
    requests: int = 0
    _uniform: dict[tuple[int, int], tuple[torch.Tensor, ...]] = field(default_factory=dict, compare=False)

    lengths = None

    @classmethod
    def of(cls, runner: ModelRunner, window: int) -> Self:
        """Return those of the target's runner."""
        graphs = runner.decode_cuda_graph_runner
        if graphs is None:
            return cls(window)
        return cls(window, tuple(graphs.capture_num_tokens), int(graphs.max_bs))

    @property
    def digest(self) -> str:
        """Return what step times depend on."""
        return f"rows by request: {','.join(map(str, self.tiers))}"

    def fit(self, requests: int) -> bool:
        """Return whether so many requests may verify as many rows as they like."""
        return not self.tiers or (requests <= self.requests and requests * self.window <= self.tiers[-1])

    def take(self, proposal: Any, decision: StepDecision, requests: int) -> Any:
        """Return the proposal that is verified: as it is, since rows are chosen when they are laid out."""
        return proposal

    def lay_out(
        self, selected: SelectedDrafts, tokens: torch.Tensor, requests: StepRequests, total: int | None
    ) -> tuple[PlannedLayout | None, torch.Tensor, int]:
        """Return the layout of a verification, the drafts verified per request, and its rows, padding included.

        There is no layout, and blocks are verified whole, if not so many requests are captured.

        Args:
            selected: the drafts that are verified, of ``tokens`` [bs, gamma].
            requests: of the step.
            total: rows that they need, or a bound on it; None if only the device knows.
        """
        bs, device = len(requests), tokens.device
        if not self.fit(bs):
            return None, selected.verify_lens, bs * self.window
        rows = bs * self.window if total is None else total
        rows = round_up_grid(rows, self.tiers) if self.tiers else rows
        room = VerifyRows.empty(bs, rows, device)
        indptr = torch.empty(bs + 1, dtype=torch.int32, device=device)  # as SGLang reads it
        plan = build_plan(requests, tokens, selected, VerifyPlan.of(replace(room, indptr=indptr), self.window))
        lens, indptr, index = self._known(selected, plan)
        layout = PlannedLayout(
            verify_lens=lens,
            graph_num_tokens=rows,
            extend_start_loc=indptr[:-1],
            qo_indptr_device=indptr,
            window=RaggedVerifyWindow(plan.positions, plan.slots, plan.input_ids, index),
        )
        return layout, plan.verify_lens, rows

    def _known(self, selected: SelectedDrafts, plan: VerifyPlan) -> tuple[torch.Tensor, ...]:
        """Return [bs] int32 rows of each request, [bs + 1] where they begin, and [N] int64 places in whole windows."""
        key = len(plan.verify_lens), selected.verify_len if isinstance(selected, FixedLens) else -1
        if key in self._uniform:
            return self._uniform[key]
        lens = torch.add(plan.verify_lens, 1, out=torch.empty_like(plan.verify_lens, dtype=torch.int32))
        # Slot 0 is padding, and its place is the sink.
        index = torch.add(plan.columns, plan.requests, alpha=self.window).masked_fill_(plan.slots == 0, -1)
        if isinstance(selected, FixedLens):
            self._uniform[key] = lens, plan.indptr, index
        return lens, plan.indptr, index

    def release(self) -> None:
        """Do nothing: a step leaves nothing behind."""
