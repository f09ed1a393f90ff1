"""Small functions that hooks put before, after or in the place of SGLang's own in the scheduler process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def row_headroom(original: Callable[[Any], int], server_args: Any) -> int:
    """Room for a second verify window past the committed length."""
    # SGLang's own headroom holds one window. Under overlap the committed length that a reservation starts from lags by
    # one more step, hence the second window.
    return original(server_args) + server_args.speculative_num_draft_tokens


def nothing_to_refuse(req: Any, enable_overlap: bool) -> None:
    """Let every request pass: what DSPARK cannot serve was refused before it was tokenized."""


def observe_results(original: Callable[..., Any], processor: Any, result: Any, batch: Any) -> Any:
    """Show the worker what became of a step."""
    predicted = original(processor, result, batch)
    processor.model_worker.observe(result, batch)
    return predicted


def pause(result: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Tell the worker that no step is under way."""
    scheduler.draft_worker.before_other_work()


def export_metrics(result: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Add our Prometheus metrics where SGLang has its own."""
    context = scheduler.metrics_collector_context
    if context.current_scheduler_metrics_enabled:
        scheduler.draft_worker.export_metrics(context.collector.labels)


def no_stock_graphs(runner: Any) -> None:
    """Decode without SGLang's CUDA graphs."""
    runner.decode_cuda_graph_runner = None
    runner.graph_mem_usage = 0


def no_stock_prefill_graphs(runner: Any, *args: Any, **kwargs: Any) -> None:
    """Prefill without SGLang's CUDA graphs."""
    runner.prefill_cuda_graph_runner = runner.eager_runner


def no_kv_copy_kernel(pool: Any) -> None:
    """Leave the kernel that copies K/V between slots out."""
    pool._kv_copy_config = None
