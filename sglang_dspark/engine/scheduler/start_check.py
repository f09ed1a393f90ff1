"""Check that SGLang has done what it was asked for when a server starts. Asked in the wrong place, it does nothing."""

from collections.abc import Iterator
from inspect import signature

from sglang.srt.managers.schedule_batch import Req

from sglang_dspark.engine.compat.arguments import tokens_per_step
from sglang_dspark.engine.forward.target import text_model
from sglang_dspark.engine.scheduler.draft_input import most_rows
from sglang_dspark.engine.sglang_types import ModelRunner
from sglang_dspark.engine.support import installed_sglang
from sglang_dspark.errors import EngineError


def check_start(runner: ModelRunner, window: int, *, captures: bool) -> None:
    """Refuse to serve if SGLang has not done so; pools and attention backends exist.

    Args:
        window: tokens that a step may verify per request.
        captures: whether the target has to return hidden states.

    Raises:
        EngineError: names the first thing that SGLang did not do.
    """
    for problem in _problems(runner, window, captures):
        raise EngineError(f"{problem}; sglang-dspark cannot serve on sglang {installed_sglang()} as it is")


def _problems(runner: ModelRunner, window: int, captures: bool) -> Iterator[str]:
    if (resolved := tokens_per_step()) != window:
        yield f"SGLang reserves for {resolved} tokens per request and step, and DSPARK verifies up to {window}"
    pool, allocator = runner.token_to_kv_pool.size, runner.token_to_kv_pool_allocator.size_full
    if pool != allocator:
        yield f"the target's K/V pool has {pool} slots and their allocator {allocator}: draft K/V would not fit"
    columns, needed = runner.req_to_token_pool.req_to_token.shape[1], runner.model_config.context_len + most_rows()
    if columns < needed:
        yield f"rows of req_to_token have {columns} columns, and a request may need {needed}"
    if list(signature(Req.update_finish_state).parameters) != ["self", "new_accepted_len"]:
        yield "Req.update_finish_state, which looks for the end of a text, takes other arguments than it did"
    if captures and not getattr(text_model(runner), "capture_aux_hidden_states", False):
        yield f"{type(runner.model).__name__} does not return the hidden states that the drafter reads"
