"""Every patch that DSPARK applies to a serving SGLang: where, why, and the check that it took effect.

SGLang applies hooks through its ``HookRegistry``, which logs a failed patch and goes on; :func:`_install` raises
instead. All of them are installed only when DSPARK was selected, each in the one process that needs it. Our flags are
there before anything is selected, see ``server_args.install_flags``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_dspark.engine.front_end import channel
from sglang_dspark.engine.support import SUPPORTED_SGLANG
from sglang_dspark.errors import EngineError

logger = logging.getLogger(__name__)

_installed: set[str] = set()


@dataclass(frozen=True)
class Hook:
    """One patch of one SGLang function."""

    name: str
    target: str
    kind: HookType
    function: Callable[..., Any]
    reason: str


def install_in_front_end() -> None:
    """Hooks of the process that tokenizes requests and serves HTTP."""
    from sglang_dspark.engine.front_end import requests
    from sglang_dspark.engine.scheduler import request_counts

    install_routes()
    _install(
        [
            Hook(
                "refuse-unserved-requests",
                "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request",
                HookType.AFTER,
                requests.check_request,
                "features that DSPARK does not serve answer HTTP 400",
            ),
            Hook(
                "refuse-wrong-types",
                "sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object",
                HookType.AROUND,
                requests.check_types,
                "a sampling parameter of a wrong type must not get as far as the scheduler",
            ),
            Hook(
                "report-counts",
                "sglang.srt.managers.tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics",
                HookType.AROUND,
                request_counts.report,
                "SGLang takes it that every draft is verified, and understates the acceptance of requests",
            ),
        ]
    )


def install_routes() -> None:
    """The part of :func:`install_in_front_end` that a server needs whose target decodes alone."""
    from sglang_dspark.engine.front_end import http, routes

    _install(
        [
            Hook(
                "mount-routes",
                "sglang.srt.entrypoints.http_server._setup_and_run_http_server",
                HookType.BEFORE,
                http.mount,
                "SGLang has no plugin interface for routes and middleware",
            ),
            Hook(
                "page-without-key",
                "sglang.srt.utils.auth.decide_request_auth",
                HookType.AFTER,
                routes.page_needs_no_key,
                "a browser has to load the page at /dspark before it can ask for the API key",
            ),
        ]
    )


def install_in_scheduler(device: str) -> None:
    """Hooks of the scheduler process; called before any memory pool exists."""
    from sglang_dspark.engine.scheduler import finish, request_counts, streams

    hooks = [
        Hook(
            "row-headroom",
            "sglang.srt.mem_cache.common.get_req_to_token_extra_context_len",
            HookType.AROUND,
            _row_headroom,
            "a step reserves two verify windows past the committed length, rows of req_to_token have room for one: "
            "near the context limit the second one would lie past the end of the row",
        ),
        Hook(
            "serve-grammars-and-logprobs",
            "sglang.srt.speculative.dflash_utils.validate_dflash_request",
            HookType.REPLACE,
            _nothing_to_refuse,
            "the scheduler aborts requests with grammars or logprobs, which its own DFLASH cannot serve",
        ),
        Hook(
            "observe-results",
            "sglang.srt.managers.scheduler_components.batch_result_processor."
            "SchedulerBatchResultProcessor._resolve_spec_v2_tokens",
            HookType.AROUND,
            _observe_results,
            "counters and traces need drafts and verify lengths where the accepted tokens are on the host anyway",
        ),
        Hook(
            "end-token-by-token",
            "sglang.srt.managers.schedule_batch.Req.update_finish_state",
            HookType.AROUND,
            finish.token_by_token,
            "of several ends among the tokens of a step, the first one counts",
        ),
        Hook(
            "session-turns",
            "sglang.srt.session.session_controller.Session.create_req",
            HookType.BEFORE,
            finish.forget_overshoot,
            "the tokens behind an end, which a step may commit, would become part of the next turn's prompt",
        ),
        Hook(
            "stream-when-due",
            "sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator.accept",
            HookType.AROUND,
            streams.when_due,
            "stream_interval is counted in tokens, of which a step brings several",
        ),
        Hook(
            "attach-counts",
            "sglang.srt.managers.scheduler_components.batch_result_processor."
            "SchedulerBatchResultProcessor._maybe_collect_routed_experts",
            HookType.AFTER,
            request_counts.attach,
            "a request that has ended takes the number of its drafts along; this is called once, just then",
        ),
        Hook(
            "answer-questions",
            "sglang.srt.managers.scheduler.Scheduler.set_internal_state",
            HookType.AROUND,
            channel.answer,
            "the routes below /dspark reach the scheduler through SGLang's channel for changing a running server",
        ),
        Hook(
            "pause",
            "sglang.srt.managers.scheduler.Scheduler.pause_generation",
            HookType.AFTER,
            _pause,
            "decoding may go on after a pause without a prefill: the pause is not the time of a step",
        ),
        Hook(
            "export-metrics",
            "sglang.srt.managers.scheduler.Scheduler.init_metrics_reporter",
            HookType.AFTER,
            _export_metrics,
            "our Prometheus metrics carry the labels of SGLang's, which are known from here on",
        ),
    ]
    if device == "cuda":
        hooks += [
            Hook(
                "no-stock-graphs",
                "sglang.srt.model_executor.model_runner.ModelRunner.init_decode_cuda_graph",
                HookType.REPLACE,
                _no_stock_graphs,
                "the stock graphs verify one number of tokens per request; DSPARK captures graphs of its own steps",
            ),
            Hook(
                "no-stock-prefill-graphs",
                "sglang.srt.model_executor.model_runner.ModelRunner.init_prefill_cuda_graph",
                HookType.REPLACE,
                _no_stock_prefill_graphs,
                "the stock graphs of prefill do not return the hidden states that the drafter reads, so none would run",
            ),
        ]
    if device == "cpu":
        hooks.append(
            Hook(
                "no-kv-copy-kernel",
                "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._init_kv_copy_and_warmup",
                HookType.REPLACE,
                _no_kv_copy_kernel,
                "with a speculative algorithm the pool warms up a Triton copy kernel, which has no CPU form; DSPARK "
                "never moves K/V between slots",
            )
        )
    _install(hooks)


def _install(hooks: Iterable[Hook]) -> None:
    wanted = [hook for hook in hooks if hook.target not in _installed]
    for hook in wanted:
        if hook.target in HookRegistry._patched:
            # SGLang patches a target once: ours would be dropped without a word.
            raise EngineError(
                f"hook {hook.name} finds {hook.target} patched by another plugin; keep that plugin out with "
                "SGLANG_PLUGINS=dspark"
            )
        HookRegistry.register(hook.target, hook.function, hook.kind)
    HookRegistry.apply_hooks()
    for hook in wanted:
        _installed.add(hook.target)
        if hook.target not in HookRegistry._patched:
            raise EngineError(
                f"hook {hook.name} did not take effect on {hook.target} ({hook.reason}); this is not an unmodified "
                f"sglang {SUPPORTED_SGLANG}: pip install --force-reinstall sglang=={SUPPORTED_SGLANG}"
            )
        logger.debug("hook %s on %s: %s", hook.name, hook.target, hook.reason)


def _row_headroom(original: Callable[[Any], int], server_args: Any) -> int:
    # SGLang's own headroom holds one window. Under overlap the committed length that a reservation starts from lags by
    # one more step, hence the second window.
    return original(server_args) + server_args.speculative_num_draft_tokens


def _nothing_to_refuse(req: Any, enable_overlap: bool) -> None:
    # What DSPARK cannot serve was refused before it was tokenized, see engine.requests.
    return None


def _no_stock_graphs(runner: Any) -> None:
    runner.decode_cuda_graph_runner = None
    runner.graph_mem_usage = 0


def _no_stock_prefill_graphs(runner: Any) -> None:
    runner.prefill_cuda_graph_runner = runner.eager_runner


def _no_kv_copy_kernel(pool: Any) -> None:
    pool._kv_copy_config = None


def _observe_results(original: Callable[..., Any], processor: Any, result: Any, batch: Any) -> Any:
    predicted = original(processor, result, batch)
    processor.model_worker.observe(result, batch)
    return predicted


def _pause(result: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    scheduler.draft_worker.before_other_work()


def _export_metrics(result: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    context = scheduler.metrics_collector_context
    if context.current_scheduler_metrics_enabled:
        scheduler.draft_worker.export_metrics(context.collector.labels)
