"""Every patch that DSPARK applies to SGLang: which function, why, in which process, and the check that it took effect.

SGLang applies hooks through its ``HookRegistry``, which logs a failed patch and goes on; :func:`install` raises
instead. Those of :data:`HOOKS` that say ``flags`` are there before DSPARK is selected; all others are installed only
when it was, each in the one process that needs it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, Literal

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_dspark.engine.support import SUPPORTED_SGLANG
from sglang_dspark.errors import EngineError

logger = logging.getLogger(__name__)

Where = Literal["flags", "front_end", "routes", "scheduler", "cuda", "cpu"]

_installed: set[str] = set()


@dataclass(frozen=True)
class Hook:
    """One patch of one SGLang function.

    Attributes:
        name: for messages and logs.
        target: the function of SGLang, as one would import it.
        kind: how the handler stands to it.
        handler: our function, below ``sglang_dspark.engine``. A name, so that a process imports only what it installs.
        where: ``flags``, wherever SGLang's command line is read; ``front_end``, the process that tokenizes requests and
            serves HTTP; ``routes``, there too, also when the target decodes alone; ``scheduler``; ``cuda`` or ``cpu``,
            in the scheduler on this device.
        reason: why SGLang has to be patched there.
    """

    name: str
    target: str
    kind: HookType
    handler: str
    where: Where
    reason: str

    def load_target(self) -> Callable[..., Any]:
        """The function that is patched. Imports its module."""
        function: Callable[..., Any] = resolve_name(self.target)
        return function

    def load_handler(self) -> Callable[..., Any]:
        """Our function. Imports its module."""
        function: Callable[..., Any] = resolve_name(f"sglang_dspark.engine.{self.handler}")
        return function


HOOKS: tuple[Hook, ...] = (
    Hook(
        "add-flags",
        "sglang.srt.server_args.ServerArgs.add_cli_args",
        HookType.AFTER,
        "startup.server_args.add_cli_args",
        "flags",
        "SGLang has no plugin interface for flags",
    ),
    Hook(
        "read-flags",
        "sglang.srt.server_args.ServerArgs.from_cli_args",
        HookType.AROUND,
        "startup.server_args.from_cli_args",
        "flags",
        "ServerArgs checks itself while it is made, so the texts of our flags have to be at hand before",
    ),
    Hook(
        "refuse-unserved-requests",
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request",
        HookType.AFTER,
        "front_end.requests.check_request",
        "front_end",
        "features that DSPARK does not serve answer HTTP 400",
    ),
    Hook(
        "refuse-wrong-types",
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object",
        HookType.AROUND,
        "front_end.requests.check_types",
        "front_end",
        "a sampling parameter of a wrong type must not get as far as the scheduler",
    ),
    Hook(
        "report-counts",
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics",
        HookType.AROUND,
        "scheduler.request_counts.report",
        "front_end",
        "SGLang takes it that every draft is verified, and understates the acceptance of requests",
    ),
    Hook(
        "mount-routes",
        "sglang.srt.entrypoints.http_server._setup_and_run_http_server",
        HookType.BEFORE,
        "front_end.http.mount",
        "routes",
        "SGLang has no plugin interface for routes and middleware",
    ),
    Hook(
        "page-without-key",
        "sglang.srt.utils.auth.decide_request_auth",
        HookType.AFTER,
        "front_end.routes.page_needs_no_key",
        "routes",
        "a browser has to load the page at /dspark before it can ask for the API key",
    ),
    Hook(
        "row-headroom",
        "sglang.srt.mem_cache.common.get_req_to_token_extra_context_len",
        HookType.AROUND,
        "scheduler.replacements.row_headroom",
        "scheduler",
        "a step reserves two verify windows past the committed length, rows of req_to_token have room for one: near "
        "the context limit the second one would lie past the end of the row",
    ),
    Hook(
        "serve-grammars-and-logprobs",
        "sglang.srt.speculative.dflash_utils.validate_dflash_request",
        HookType.REPLACE,
        "scheduler.replacements.nothing_to_refuse",
        "scheduler",
        "the scheduler aborts requests with grammars or logprobs, which its own DFLASH cannot serve",
    ),
    Hook(
        "observe-results",
        "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor._resolve_spec_v2_tokens",
        HookType.AROUND,
        "scheduler.replacements.observe_results",
        "scheduler",
        "counters and traces need drafts and verify lengths where the accepted tokens are on the host anyway",
    ),
    Hook(
        "end-token-by-token",
        "sglang.srt.managers.schedule_batch.Req.update_finish_state",
        HookType.AROUND,
        "scheduler.finish.token_by_token",
        "scheduler",
        "of several ends among the tokens of a step, the first one counts",
    ),
    Hook(
        "attach-counts",
        "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor._maybe_collect_routed_experts",
        HookType.AFTER,
        "scheduler.request_counts.attach",
        "scheduler",
        "a request that has ended takes the number of its drafts along; this is called once, just then",
    ),
    Hook(
        "answer-questions",
        "sglang.srt.managers.scheduler.Scheduler.set_internal_state",
        HookType.AROUND,
        "front_end.channel.answer",
        "scheduler",
        "the routes below /dspark reach the scheduler through SGLang's channel for changing a running server",
    ),
    Hook(
        "pause",
        "sglang.srt.managers.scheduler.Scheduler.pause_generation",
        HookType.AFTER,
        "scheduler.replacements.pause",
        "scheduler",
        "decoding may go on after a pause without a prefill: the pause is not the time of a step",
    ),
    Hook(
        "export-metrics",
        "sglang.srt.managers.scheduler.Scheduler.init_metrics_reporter",
        HookType.AFTER,
        "scheduler.replacements.export_metrics",
        "scheduler",
        "our Prometheus metrics carry the labels of SGLang's, which are known from here on",
    ),
    Hook(
        "no-stock-graphs",
        "sglang.srt.model_executor.model_runner.ModelRunner.init_decode_cuda_graph",
        HookType.REPLACE,
        "scheduler.replacements.no_stock_graphs",
        "cuda",
        "the stock graphs verify one number of tokens per request; DSPARK captures graphs of its own steps",
    ),
    Hook(
        "no-stock-prefill-graphs",
        "sglang.srt.model_executor.model_runner.ModelRunner.init_prefill_cuda_graph",
        HookType.REPLACE,
        "scheduler.replacements.no_stock_prefill_graphs",
        "cuda",
        "the stock graphs of prefill do not return the hidden states that the drafter reads, so none would run",
    ),
    Hook(
        "no-kv-copy-kernel",
        "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._init_kv_copy_and_warmup",
        HookType.REPLACE,
        "scheduler.replacements.no_kv_copy_kernel",
        "cpu",
        "with a speculative algorithm the pool warms up a Triton copy kernel, which has no CPU form; DSPARK never "
        "moves K/V between slots",
    ),
)


def register_flags() -> None:
    """Hand the hooks of the command line to SGLang, which applies them after the plugin's entry point returns."""
    for hook in HOOKS:
        if hook.where == "flags":
            HookRegistry.register(hook.target, hook.load_handler(), hook.kind)


def install(*places: str) -> None:
    """Apply the hooks of these places; those in force stay. In a scheduler, call it before any memory pool exists.

    Raises:
        EngineError: another plugin has patched a target, or a patch did not take effect.
    """
    wanted = [hook for hook in HOOKS if hook.where in places and hook.target not in _installed]
    for hook in wanted:
        if hook.target in HookRegistry._patched:
            # SGLang patches a target once: ours would be dropped without a word.
            raise EngineError(
                f"hook {hook.name} finds {hook.target} patched by another plugin; keep that plugin out with "
                "SGLANG_PLUGINS=dspark"
            )
        HookRegistry.register(hook.target, hook.load_handler(), hook.kind)
    HookRegistry.apply_hooks()
    for hook in wanted:
        _installed.add(hook.target)
        if hook.target not in HookRegistry._patched:
            raise EngineError(
                f"hook {hook.name} did not take effect on {hook.target} ({hook.reason}); this is not an unmodified "
                f"sglang {SUPPORTED_SGLANG}: pip install --force-reinstall sglang=={SUPPORTED_SGLANG}"
            )
        logger.debug("hook %s on %s: %s", hook.name, hook.target, hook.reason)
