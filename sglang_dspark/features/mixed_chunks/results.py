"""Treat what a mixed step gives to running requests as what a plain step gives them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from sglang.srt.plugins.hook_registry import HookType

from sglang_dspark.engine.batch import is_running, prompts_of
from sglang_dspark.engine.draft_input import forget_step
from sglang_dspark.engine.hooks import Moment, hook
from sglang_dspark.engine.scheduler import attached_decoder
from sglang_dspark.engine.sglang_types import GenerationBatchResult, Req, ScheduleBatch
from sglang_dspark.scheduling.schedule import Schedule
from sglang_dspark.step.decision import PLAIN
from sglang_dspark.step.record import StepRecord

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor


@hook(
    "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor.process_batch_result_prefill",
    HookType.BEFORE,
    where="any_worker",
    reason="SGLang counts a step for running requests in the results of decode steps alone",
)
def count_running(
    processor: SchedulerBatchResultProcessor, batch: ScheduleBatch, result: GenerationBatchResult
) -> None:
    """Show the step to the worker, and count it for its running requests, before SGLang appends their tokens."""
    prompts, worker = len(prompts_of(batch)), attached_decoder(processor.model_worker)
    if worker is processor.model_worker:  # ours
        forget_step(batch.decoding_reqs or ())
    places = [prompts + place for place, req in enumerate(batch.decoding_reqs or ()) if is_running(req)]
    if not places:
        return
    running = [batch.reqs[place] for place in places]
    if result.copy_done is not None:
        result.copy_done.synchronize()
    for req in running:
        req.spec_verify_ct += 1
        req.spec_num_cap_tokens += 1
        req.update_spec_correct_drafts_histogram(0)
        req.update_spec_cap_lens_histogram(1)
        req.update_finish_state = partial(_commit_at_end, req)
    record = plain_record(running, result.next_token_ids[places, None].cpu(), worker.schedule)
    worker.control.observe(running, record, [1] * len(running), None)


def _commit_at_end(req: Req, *new_tokens: int) -> None:
    """Take the place of SGLang's ``update_finish_state`` once: count the anchor of a request that ends.

    SGLang counts the anchors of a mixed step as committed for requests that go on alone. The prefix cache would take
    the recurrent state of one that ends for that of a text without its last token.
    """
    del req.update_finish_state
    req.update_finish_state(*new_tokens)
    if req.finished():
        req.kv.kv_committed_len += 1


def plain_record(reqs: Sequence[Req], tokens: torch.Tensor, schedule: Schedule) -> StepRecord:
    """Return the record of a step that has given each of SGLang's requests one of ``tokens [n, 1]``, and drafted none.

    Args:
        tokens: int64, on the host.
    """
    none = [0] * len(reqs)
    return StepRecord(
        requests=[req.rid for req in reqs],
        decision=PLAIN,
        drafted=none,
        verify_lens=torch.tensor(none),
        confidence=None,
        traced=torch.tensor([[req.seqlen - 1, req.output_ids[-1]] for req in reqs]),
        committed=tokens,
        policy=schedule.policy.name,
        parked=schedule.parked,
    )


@hook(
    "sglang.srt.managers.scheduler.Scheduler.is_disable_overlap_for_batch",
    HookType.AROUND,
    where="any_worker",
    reason="under overlap SGLang would launch a mixed step while grammars lack the tokens of the step before",
    by=Moment.SOME_TIME,  # under overlap
)
def wait_for_grammars(
    original: Callable[..., bool], scheduler: Scheduler, batch: ScheduleBatch | None, last_batch: ScheduleBatch | None
) -> bool:
    """Return whether SGLang processes the result of the step before first: grammars of running requests follow it."""
    if original(scheduler, batch, last_batch):
        return True
    if batch is None or not batch.forward_mode.is_mixed() or not scheduler.result_queue:
        return False
    return any(req.grammar is not None for req in batch.decoding_reqs or ())
