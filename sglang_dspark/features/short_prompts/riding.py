"""Run the step of requests that run beside prompts. SGLang sees a prefill, during which other requests wait.

So SGLang merges the prompts into the running batch after the step, as after every prefill, and finds all requests where
it looks for them when one is aborted, or all are retracted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from sglang.srt.managers.overlap_utils import resolve_forward_inputs
from sglang.srt.managers.schedule_batch import NextBatchPlan
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.plugins.hook_registry import HookType

from sglang_dspark.engine.batch import RIDERS, riders_of
from sglang_dspark.engine.hooks import Moment, hook
from sglang_dspark.engine.sglang_types import ScheduleBatch
from sglang_dspark.features.short_prompts.blocks import Blocks

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

    from sglang_dspark.engine.batch import DSparkBatchResult
    from sglang_dspark.engine.worker_base import Publish

PART = "dspark_short_prompts"
"""Attribute of SGLang's ``ReqToTokenPool`` by which batches find the part of their scheduler."""


@dataclass
class RunningBeside:
    """The requests that run beside the prompts of a batch.

    Attributes:
        batch: SGLang's, prepared for a decode step.
        blocks: how the prompts are laid out.
        scheduler: SGLang's, once the batch of prompts is the next one.
        drafted: whether the step has drafts, once it has run.
    """

    batch: Any
    blocks: Blocks
    scheduler: Scheduler = field(init=False)
    drafted: bool = field(init=False, default=False)

    def __len__(self) -> int:
        return len(self.batch.reqs)

    def decode(
        self, prompts: ScheduleBatch, step: Callable[[ScheduleBatch, Publish], DSparkBatchResult]
    ) -> RidingResult:
        """Do around the step what SGLang's ``run_batch`` does around one of decoding alone.

        Returns:
            A result for prompts, without any of their own yet.
        """
        scheduler, batch = self.scheduler, self.batch
        rows, future_map, overlap = batch.req_pool_indices, scheduler.future_map, scheduler.enable_overlap
        if overlap:
            future_map.resolve_seq_lens_cpu(batch)
        resolve_forward_inputs(batch, future_map)
        kept = list(vars(batch).values())
        with scheduler._forward_isolation(batch, overlap=False):
            result = step(batch, partial(future_map.publish, rows) if overlap else _nowhere)
        batch.spec_info = result.next_draft_input
        self.drafted = result.record is not None and result.record.decision.draft_len > 0
        if overlap:
            scheduler._relay_forward_payload(batch, rows, result)
            batch.spec_info.future_indices = rows
        else:
            batch.seq_lens = result.new_seq_lens
            if batch.seq_lens_cpu is not None:
                batch.seq_lens_cpu = result.new_seq_lens.cpu()
        for name in ("forward_iter", "launch_ts", "after_idle_gap"):  # by which SGLang times steps
            setattr(batch, name, getattr(prompts, name))
        return RidingResult(
            running=(batch.copy(), result), extra_keep_alive_refs=kept, can_run_cuda_graph=result.can_run_cuda_graph
        )


@dataclass(kw_only=True)
class RidingResult(GenerationBatchResult):
    """The result of prompts, and that of the requests that ran beside them, with their batch."""

    running: tuple[Any, DSparkBatchResult]

    @property
    def batches_beside(self) -> Sequence[Any]:
        """Return the batches whose requests get tokens by this result, beside that of the prompts."""
        return [self.running[0]]

    def copy_to_cpu(self, *args: object, **kwargs: object) -> None:
        """Start the copies of both; the last one records the event that readers of the prompts wait for."""
        batch, result = self.running
        result.copy_done = torch.get_device_module(self.next_token_ids.device).Event()
        result.copy_to_cpu(return_logprob=batch.return_logprob, return_hidden_states=batch.return_hidden_states)
        super().copy_to_cpu(*args, **kwargs)


def beside(prompts: ScheduleBatch) -> RunningBeside | None:
    """Return what runs beside the prompts of SGLang's batch in the same verification."""
    return cast("RunningBeside | None", riders_of(prompts))


@hook(
    "sglang.srt.managers.schedule_batch.ScheduleBatch.mix_with_running",
    HookType.AROUND,
    where="scheduler",
    reason="beside a prompt SGLang gives running requests one token; drafts of these fit into its verification",
    by=Moment.SOME_TIME,  # with mixed chunks
)
def ride_or_mix(original: Callable[..., None], prompts: ScheduleBatch, running: ScheduleBatch) -> None:
    """Note requests that draft beside prompts, or have SGLang give each one token."""
    part = getattr(prompts.req_to_token_pool, PART, None)
    blocks = None if part is None else part.blocks_beside(prompts, running)
    if blocks is None:
        original(prompts, running)
    else:
        vars(prompts)[RIDERS] = RunningBeside(running, blocks)


@hook(
    "sglang.srt.managers.scheduler.Scheduler.get_new_batch_prefill",
    HookType.AFTER,
    where="scheduler",
    reason="running requests that are verified beside prompts stay a batch of their own",
    by=Moment.SOME_TIME,
)
def keep_apart(plan: NextBatchPlan, scheduler: Scheduler, running_batch: object) -> None:
    """Have requests that are to run beside the next batch of prompts stay the running ones."""
    prompts = plan.batch_to_run
    found = None if prompts is None else beside(prompts)
    if found is None:
        return
    found.scheduler, prompts.decoding_reqs = scheduler, None
    found.batch.batch_is_full, plan.running_batch = plan.running_batch.batch_is_full, found.batch


@hook(
    "sglang.srt.managers.scheduler.Scheduler.process_batch_result",
    HookType.AFTER,
    where="scheduler",
    reason="a step beside prompts has a result of its own behind theirs",
)
def process_running(processed: None, scheduler: Scheduler, batch: object, result: object) -> None:
    """Process what became of the requests beside prompts."""
    if isinstance(result, RidingResult):
        running, outcome = result.running
        scheduler.process_batch_result(running, outcome)
        getattr(running.req_to_token_pool, PART).count(outcome)


def _nowhere(new_seq_lens: torch.Tensor) -> None:
    """Publish nothing: without overlap the next step gets the lengths from the batch."""
