"""Handle the smaller hooks of the scheduler process; ``launch/hooks.py`` says where each stands and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sglang_dspark.engine.compat.arguments import tokens_per_step
from sglang_dspark.engine.compat.decoder import decoder_of
from sglang_dspark.engine.scheduler.batch import DSparkBatchResult
from sglang_dspark.engine.sglang_types import Req, ScheduleBatch
from sglang_dspark.fence import fenced, nothing

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
    from sglang.srt.managers.scheduler_components.metrics_reporter import SchedulerMetricsReporter
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool


def nothing_to_refuse(req: Req, enable_overlap: bool) -> None:
    """Let every request pass: what DSPARK cannot serve was refused before it was tokenized."""


def observe_results(
    original: Callable[..., Sequence[Sequence[int]]],
    processor: SchedulerBatchResultProcessor,
    result: DSparkBatchResult,
    batch: ScheduleBatch,
) -> Sequence[Sequence[int]]:
    """Unpack a step's result before SGLang reads its tokens, and show it to the worker afterwards."""
    result.read_copy()
    predicted = original(processor, result, batch)
    for part in processor.model_worker.parts:
        part.tokens_come(batch, result, predicted)
    processor.model_worker.observe(result, batch)
    return predicted


def end_request(result: None, processor: SchedulerBatchResultProcessor, req: Req) -> None:
    """Show the worker a request whose text is complete."""
    processor.model_worker.end_request(req)


def report_verified(
    original: Callable[..., None], reporter: SchedulerMetricsReporter, *args: object, **kwargs: object
) -> None:
    """Have SGLang divide the accepted drafts by the verified ones, in its log and in ``sglang:spec_accept_rate``.

    It divides them by all drafts of a block in every round. So the accepted ones are scaled while it does. It would
    also report drafts proposed as accepted lengths of blocks, so it is told of none.
    """
    accepted = reporter.spec_num_correct_drafts
    _scale_accepted(reporter)
    original(reporter, *args, **kwargs)
    if reporter.spec_num_forward_ct:  # it goes on adding
        reporter.spec_num_correct_drafts = accepted


@fenced("shares of accepted drafts", instead=nothing)
def _scale_accepted(reporter: SchedulerMetricsReporter) -> None:
    reporter.spec_num_block_accept_tokens = 0
    accepted, rounds = reporter.spec_num_correct_drafts, reporter.spec_num_forward_ct
    verified = reporter.spec_num_cap_tokens - rounds
    if verified:
        reporter.spec_num_correct_drafts = accepted / verified * rounds * (tokens_per_step() - 1)


def pause(result: None, scheduler: Scheduler, *args: object, **kwargs: object) -> None:
    """Tell the worker that no step is under way."""
    decoder_of(scheduler).schedule.invalidate()


def export_metrics(result: None, scheduler: Scheduler, *args: object, **kwargs: object) -> None:
    """Add our Prometheus metrics to SGLang's."""
    context = scheduler.metrics_collector_context
    if context.current_scheduler_metrics_enabled:
        decoder_of(scheduler).reporting.export_metrics(context.collector.labels)


def no_kv_copy_kernel(pool: MHATokenToKVPool) -> None:
    """Leave out the kernel that copies K/V between slots."""
    pool._kv_copy_config = None
