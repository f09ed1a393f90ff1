"""Small functions that hooks put before, after or in the place of SGLang's own in the scheduler process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dspark.engine.compat.arguments import tokens_per_step
from sglang_dspark.engine.scheduler.draft_input import STRIDE
from sglang_dspark.engine.scheduler.finish import look_closely
from sglang_dspark.engine.scheduler.logprobs import leave_committed
from sglang_dspark.engine.support import PAGE_SIZES


def row_headroom(original: Callable[[], int]) -> int:
    """Room for a second verify window past the committed length, for a stride, and for the rest of a page."""
    # SGLang's own headroom holds one window. Under overlap the committed length that a reservation starts from lags by
    # one more step, hence the second window.
    return original() + tokens_per_step() + STRIDE + max(PAGE_SIZES) - 1


def nothing_to_refuse(req: Any, enable_overlap: bool) -> None:
    """Let every request pass: what DSPARK cannot serve was refused before it was tokenized."""


def observe_results(original: Callable[..., Any], processor: Any, result: Any, batch: Any) -> Any:
    """Show the worker what became of a step, whose tensors have come to the host."""
    result.read_copy()
    predicted = original(processor, result, batch)
    look_closely(batch.reqs, predicted)
    if batch.return_logprob:
        leave_committed(result.logits_output, [len(tokens) for tokens in predicted])
    processor.model_worker.observe(result, batch)
    return predicted


def report_verified(original: Callable[..., None], reporter: Any, *args: Any, **kwargs: Any) -> None:
    """Have SGLang divide the accepted drafts by the verified ones, in its log and in ``sglang:spec_accept_rate``.

    It divides them by all drafts of a block in every round. So the accepted ones are scaled while it does.
    """
    accepted, rounds = reporter.spec_num_correct_drafts, reporter.spec_num_forward_ct
    verified = reporter.spec_num_cap_tokens - rounds
    if verified:
        reporter.spec_num_correct_drafts = accepted / verified * rounds * (tokens_per_step() - 1)
    original(reporter, *args, **kwargs)
    if reporter.spec_num_forward_ct:  # it goes on adding
        reporter.spec_num_correct_drafts = accepted


def pause(result: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Tell the worker that no step is under way."""
    scheduler.draft_worker.before_other_work()


def export_metrics(result: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Add our Prometheus metrics where SGLang has its own."""
    context = scheduler.metrics_collector_context
    if context.current_scheduler_metrics_enabled:
        scheduler.draft_worker.export_metrics(context.collector.labels)


def no_kv_copy_kernel(pool: Any) -> None:
    """Leave the kernel that copies K/V between slots out."""
    pool._kv_copy_config = None


def positions_of_text(forward_batch: Any, model_runner: Any, batch: Any, seq_positions: Any = None) -> None:
    """Give the rows of a verification three equal coordinates: requests with images were refused."""
    forward_batch.mrope_positions = forward_batch.positions.repeat(3, 1)
