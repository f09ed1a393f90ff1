"""Functions of SGLang that are hooked and have moved, what takes the place of those that were cut anew, and a model.

Graphs were captured by methods of the model runner once. These are still there, but when SGLang starts it calls
functions in their place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.util import find_spec
from inspect import signature
from typing import Any

from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend

from sglang_dspark.engine.compat.ranks import tp_size

logger = logging.getLogger(__name__)

_SIZING = "sglang.srt.mem_cache.allocation_sizing"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_SETUP = "sglang.srt.model_executor.model_runner_components.cuda_graph_setup"

Replacement = Callable[..., Any]


def loses_residuals(architecture: str) -> bool:
    """Whether hidden states that SGLang returns of such a target lack what its layers have not added up yet."""
    if architecture not in ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"):
        return False
    from sglang.srt.models.gemma3_causal import Gemma3DecoderLayer

    # Where layers hand the sum on beside their own output, the model still captures the output alone.
    return "residual" in signature(Gemma3DecoderLayer.forward).parameters


def reduces_what_it_captures() -> bool:
    """Whether layers reduce over the ranks what is captured of them, even where the next norm would do so."""
    return _exists("sglang.srt.layers.aux_hidden_states")


def _exists(module: str) -> bool:
    return find_spec(module.rpartition(".")[0]) is not None and find_spec(module) is not None


ROW_HEADROOM = f"{_SIZING if _exists(_SIZING) else 'sglang.srt.mem_cache.common'}.get_req_to_token_extra_context_len"
"""Columns of ``req_to_token`` beyond the context length."""


def _no_method_decode(runner: Any) -> None:
    runner.decode_cuda_graph_runner = None
    runner.graph_mem_usage = 0


def _method_prefill(original: Replacement, runner: Any, *args: Any, **kwargs: Any) -> None:
    try:
        if not _lose_states():
            original(runner, *args, **kwargs)
            return
    except Exception as error:  # noqa: BLE001 - whatever it is, prompts can be encoded without
        _go_on_without(runner, error)
    runner.prefill_cuda_graph_runner = runner.eager_runner


def _no_decode_capture(*, model_runner: Any) -> Any:
    return _nothing_captured(None, "target_verify")


def _prefill_capture(original: Replacement, *, model_runner: Any, eager_runner: Any, **others: Any) -> Any:
    try:
        if not _lose_states():
            return original(model_runner=model_runner, eager_runner=eager_runner, **others)
    except Exception as error:  # noqa: BLE001 - whatever it is, prompts can be encoded without
        _go_on_without(model_runner, error)
    return _nothing_captured(eager_runner, "prefill")


def _lose_states() -> bool:
    """Whether the graphs of prefill that SGLang has chosen return no hidden states; says so."""
    if any(check_cuda_graph_backend(Phase.PREFILL, backend) for backend in (Backend.DISABLED, Backend.BREAKABLE)):
        return False
    logger.warning("DSPARK: prefill without CUDA graphs: those that SGLang has chosen return no hidden states")
    return True


def _go_on_without(runner: Any, error: Exception) -> None:
    """Say why; but end where several ranks capture in step, for the others wait for this one."""
    if tp_size(runner) > 1:
        raise error
    logger.warning("DSPARK: prefill without CUDA graphs: they cannot be captured here: %s", error)


def _nothing_captured(runner: Any, phase: str) -> Any:
    from sglang.srt.model_executor.model_runner_components.cuda_graph_setup import GraphCapture

    return GraphCapture(runner=runner, memory_phase=phase, memory_usage_gb=0, capture_time=0)


no_decode_graphs: Replacement
prefill_graphs: Replacement  # around SGLang's

if _exists(_SETUP):
    DECODE_GRAPHS, no_decode_graphs = f"{_SETUP}.capture_decode_graph", _no_decode_capture
    PREFILL_GRAPHS, prefill_graphs = f"{_SETUP}.capture_prefill_graph", _prefill_capture
else:
    DECODE_GRAPHS, no_decode_graphs = f"{_RUNNER}.init_decode_cuda_graph", _no_method_decode
    PREFILL_GRAPHS, prefill_graphs = f"{_RUNNER}.init_prefill_cuda_graph", _method_prefill
