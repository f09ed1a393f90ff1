"""Lists the core's patches of SGLang: which function, why, in which process. Applies them with those of features.

SGLang applies hooks through its ``HookRegistry``, which logs a failed patch and goes on; :func:`install` raises
instead. Hooks that say ``flags`` are there before DSPARK is selected; all others are installed only when it was, each
in the one process that needs it, and those of a feature only if the server uses it.
"""

from __future__ import annotations

import logging

from sglang.srt.plugins import hook_registry
from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

from sglang_dspark.config import option_text
from sglang_dspark.engine.feature import all_features
from sglang_dspark.engine.hook_checks import Moment, expect_called
from sglang_dspark.engine.launch.hook import Hook, Where
from sglang_dspark.engine.sglang_types import ServerArgs
from sglang_dspark.engine.support import installed_sglang
from sglang_dspark.errors import EngineError

logger = logging.getLogger(__name__)

_OURS = HookSource("dspark", "sglang-dspark")
"""What SGLang's log says of our hooks; most are registered when its plugins have been loaded."""

_GRAPHS = "sglang.srt.model_executor.model_runner_components.cuda_graph_setup"

_installed: set[str] = set()
"""Names. Hooks on one target are installed together: SGLang patches it once, with the first of them innermost."""


HOOKS: tuple[Hook, ...] = (
    Hook(
        "sglang.srt.server_args.ServerArgs.add_cli_args",
        HookType.AFTER,
        "engine.launch.resolution.add_cli_args",
        "flags",
        "SGLang has no plugin interface for flags",
    ),
    Hook(
        "sglang.srt.server_args.ServerArgs.from_cli_args",
        HookType.AROUND,
        "engine.launch.resolution.from_cli_args",
        "flags",
        "ServerArgs has no place for the texts of our flags",
    ),
    Hook(
        "sglang.srt.server_args.ServerArgs.resolve_once",
        HookType.AROUND,
        "engine.launch.resolution.resolve_once",
        "flags",
        "what SGLang would decide otherwise is decided before, and undone where the target decodes alone",
    ),
    Hook(
        "sglang.srt.server_args.ServerArgs.resolved_dict",
        HookType.AFTER,
        "engine.launch.launch.tell_drafter",
        "front_end",
        "SGLang is not told of the drafter, which its description of a server names",
        Moment.SOME_TIME,
    ),
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object",
        HookType.AFTER,
        "engine.api.requests.check_request",
        "front_end",
        "a bad field speculation, features that DSPARK does not serve, and what the scheduler would not survive answer "
        "HTTP 400; this makes what travels to the scheduler, for every route and the offline engine",
    ),
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._send_one_request",
        HookType.BEFORE,
        "engine.api.hook_handlers.seed_each",
        "front_end",
        "SGLang sends the n samples of a request with one seed; seeds are served here, so all would have one text",
        Moment.SOME_TIME,
    ),
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._stream_one_response",
        HookType.AFTER,
        "engine.api.hook_handlers.look_at_answers",
        "front_end",
        "with the first answer it is known which hooks SGLang calls",
    ),
    Hook(
        "sglang.srt.entrypoints.http_server._setup_and_run_http_server",
        HookType.BEFORE,
        "engine.api.http.mount",
        "routes",
        "SGLang has no plugin interface for routes and middleware",
        Moment.SOME_TIME,
    ),
    Hook(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator.configure",
        HookType.BEFORE,
        "engine.compat.pools.make_room",
        "scheduler",
        "SGLang reads how much K/V a drafter has from configs of its own drafters",
        Moment.READY,
    ),
    Hook(
        "sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len",
        HookType.AROUND,
        "engine.scheduler.draft_input.row_headroom",
        "any_worker",
        "a step reserves two verify windows past the committed length and a stride, rows of req_to_token may have room "
        "for one window: near the context limit the rest would lie past the end of the row",
        Moment.READY,
    ),
    Hook(
        "sglang.srt.managers.schedule_batch.ScheduleBatch._new_tokens_required_next_decode_spec_v2",
        HookType.REPLACE,
        "engine.scheduler.draft_input.slots_required",
        "scheduler",
        "SGLang retracts or aborts requests for which two verify windows do not fit, where a plain step does",
    ),
    Hook(
        "sglang.srt.managers.schedule_batch.ScheduleBatch.check_decode_mem",
        HookType.AROUND,
        "engine.scheduler.draft_input.fits",
        "scheduler",
        "slots that running requests keep for drafts go to those that are about to be retracted",
    ),
    Hook(
        "sglang.srt.speculative.dflash_utils.validate_dflash_request",
        HookType.REPLACE,
        "fence.nothing",
        "scheduler",
        "the scheduler aborts requests with grammars or logprobs, which its own DFLASH cannot serve",
    ),
    Hook(
        "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor._resolve_spec_v2_tokens",
        HookType.AROUND,
        "engine.scheduler.hook_handlers.observe_results",
        "scheduler",
        "the result of a step comes as one tensor, which is taken apart where SGLang reads its tokens; there "
        "counters, traces and features also learn what became of its drafts",
    ),
    Hook(
        "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor._maybe_collect_routed_experts",
        HookType.AFTER,
        "engine.scheduler.hook_handlers.end_request",
        "scheduler",
        "when a request has ended, its answer may be kept, and SGLang may have counted tokens behind its end",
        Moment.SOME_TIME,
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.pause_generation",
        HookType.AFTER,
        "engine.scheduler.hook_handlers.pause",
        "any_worker",
        "decoding may go on after a pause without a prefill: the pause is not the time of a step",
        Moment.SOME_TIME,
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.is_fully_idle",
        HookType.BEFORE,
        "engine.scheduler.hook_handlers.take_out_ended",
        "any_worker",
        "a step runs beside the one in which a speculating server learns that a text has ended: right behind the last "
        "answer, SGLang would refuse to flush its cache, to take new weights and to release memory",
        Moment.SOME_TIME,
    ),
    Hook(
        "sglang.srt.layers.logits_processor.LogitsProcessor._copy_logits_to_buffer",
        HookType.AROUND,
        "engine.forward.graphs.copy_logits",
        "scheduler",
        "it copies logits to float32, which changes no number, and reads and writes all of them in every step",
        Moment.SOME_TIME,
    ),
    Hook(
        f"{_GRAPHS}.capture_decode_graph",
        HookType.REPLACE,
        "engine.forward.graphs.no_decode_graphs",
        "cuda",
        "the stock graphs verify one number of tokens per request; DSPARK captures graphs of its own steps",
        Moment.READY,
    ),
    Hook(
        f"{_GRAPHS}.capture_prefill_graph",
        HookType.AROUND,
        "engine.forward.graphs.prefill_graphs",
        "cuda",
        "of the stock graphs of prefill only the breakable ones return the hidden states that the drafter reads; a "
        "capture that fails shall not end the start",
        Moment.READY,
    ),
    Hook(
        "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._init_kv_copy_and_warmup",
        HookType.REPLACE,
        "engine.scheduler.hook_handlers.no_kv_copy_kernel",
        "cpu",
        "with a speculative algorithm the pool warms up a Triton copy kernel, which has no CPU form; DSPARK never "
        "moves K/V between slots",
        Moment.READY,
    ),
)


def register_flags() -> None:
    """Hand SGLang the hooks that are there before DSPARK is selected; it applies them when its plugins are loaded."""
    simulated = option_text("simulate_acceptance", {}) is not None
    for hook in all_hooks():
        if hook.where == "flags" or (simulated and hook.where == "simulated"):
            HookRegistry.register(hook.target, hook.load_handler(), hook.kind)


def all_hooks() -> tuple[Hook, ...]:
    """Return the hooks of the core and those of all features."""
    return (*HOOKS, *(hook for feature in all_features() for hook in feature.hooks))


def install(args: ServerArgs, *places: Where) -> None:
    """Apply the hooks of these places; those in force stay. In a scheduler, call it before any memory pool exists.

    Args:
        args: of the server, which say which features it uses.

    Raises:
        EngineError: another plugin has patched a target, or a patch did not take effect.
    """
    placed = [hook for hook in HOOKS if hook.where in places]
    for feature in all_features():
        here = [hook for hook in feature.hooks if hook.where in places]
        placed += here if here and feature.is_used(args) else []
    wanted = [hook for hook in placed if hook.name not in _installed]
    for hook in wanted:
        if hook.target in HookRegistry._patched:
            # SGLang patches a target once: ours would be dropped without a word.
            raise EngineError(
                f"hook {hook.name} finds {hook.target} patched by another plugin; keep that plugin out with "
                "SGLANG_PLUGINS=dspark"
            )
        handler = expect_called(hook.name, hook.target, hook.by, hook.load_handler())
        HookRegistry.register(hook.target, handler, hook.kind, source=_OURS)
    _apply()
    release = installed_sglang()
    for hook in wanted:
        _installed.add(hook.name)
        if hook.target not in HookRegistry._patched:
            raise EngineError(
                f"hook {hook.name} did not take effect on {hook.target} ({hook.reason}); this is not an unmodified "
                f"sglang {release}: pip install --force-reinstall sglang=={release}"
            )
        logger.debug("hook %s on %s: %s", hook.handler, hook.target, hook.reason)


def _apply() -> None:
    """Have SGLang apply what is registered, but look for none but functions among the names of all modules.

    It looks for methods, too, which no module has by name: 40 ms for each hook, among 8,000 modules.
    """
    find_all = getattr(hook_registry, "_propagate_patch", None)
    if find_all is None:  # another release of SGLang
        HookRegistry.apply_hooks()
        return

    def find(original: object, wrapped: object, owner: object) -> int:
        return 0 if isinstance(owner, type) else find_all(original, wrapped, owner)

    hook_registry._propagate_patch = find
    try:
        HookRegistry.apply_hooks()
    finally:
        hook_registry._propagate_patch = find_all
