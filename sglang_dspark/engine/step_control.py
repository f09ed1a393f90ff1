"""Decides the steps of a worker, ours or SGLang's own, and learns from what comes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from sglang_dspark.engine.agreement import Agreement
from sglang_dspark.engine.draft_input import committed_lengths
from sglang_dspark.engine.part import Part, Weigher, part_of
from sglang_dspark.engine.request_options import BatchOptions
from sglang_dspark.engine.sglang_types import Req, ScheduleBatch
from sglang_dspark.errors import best_effort, nothing
from sglang_dspark.scheduling.policies import ExtraRows
from sglang_dspark.scheduling.schedule import Schedule
from sglang_dspark.step.decision import StepDecision, StepRecord


@dataclass(frozen=True)
class StepControl:
    """The schedule of a worker between SGLang's batches and their results.

    Attributes:
        on_gpu: whether host and device work side by side.
    """

    schedule: Schedule
    agreement: Agreement
    parts: Sequence[Part]
    on_gpu: bool

    @cached_property
    def weigher(self) -> Weigher | None:
        """Return the part that weighs requests; None if there is none."""
        return part_of(self.parts, Weigher)

    def choose(self, batch: ScheduleBatch, options: BatchOptions, extra: ExtraRows | None = None) -> StepDecision:
        """Return how deep to draft and how much to verify, from what is known by now of the steps before.

        All ranks of the server get rank 0's decision.

        Args:
            extra: further rows of its verification.
        """
        # Grammars have made the host wait for the step before, and cost it time for each row.
        awaited = self.on_gpu and batch.has_grammar
        # Of the host: under overlap it does not know yet what the step under way commits.
        context = sum(committed_lengths(batch.reqs)) / len(batch.reqs)
        weights = None if self.weigher is None else self.weigher.weights(batch)
        decision = self.schedule.choose(
            options.ids, context, options.limits, weights, extra, traced=options.traced, awaited=awaited
        )
        return self.agreement.share(decision)

    def forget(self, *, new_drafter: bool) -> None:
        """Forget what was learned, and have features do so: see :meth:`Schedule.forget`."""
        self.schedule.forget(new_drafter=new_drafter)
        for part in self.parts:
            part.weights_changed()

    def observe(
        self, reqs: Sequence[Req], record: StepRecord, committed: list[int], times_ms: tuple[float, float] | None
    ) -> None:
        """Learn from a step whose result has reached the host.

        Args:
            reqs: SGLang's requests of the step, which are about to take its tokens.
            record: of the step.
            committed: tokens committed per request, bonus included.
            times_ms: what the step took the device, and how long the host has waited for it; None if it is not known.
        """
        # Under overlap a request that has just ended takes part in one more step, whose tokens are dropped.
        running = [index for index, req in enumerate(reqs) if not (req.finished() or req.is_retracted)]
        accepted = [committed[index] - 1 for index in running]
        self._learn_time(times_ms)
        if running:
            self._learn(record, running, accepted)
        for part in self.parts:
            part.step_done(reqs, record, running, accepted)

    @best_effort("updates of step times", instead=nothing)
    def _learn_time(self, times_ms: tuple[float, float] | None) -> None:
        if times_ms is not None:
            self.schedule.processed(*times_ms)

    @best_effort("updates of acceptance", instead=nothing)
    def _learn(self, record: StepRecord, running: list[int], accepted: list[int]) -> None:
        self.schedule.observe(record, running, accepted)
