"""SGLang's own CUDA graphs: none of decode, and of prefill those that return hidden states."""

import logging
from collections.abc import Callable

from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend
from sglang.srt.model_executor.model_runner_components.cuda_graph_setup import GraphCapture
from sglang.srt.runtime_context import get_parallel

from sglang_dspark.engine.sglang_types import ModelRunner

logger = logging.getLogger(__name__)


def no_decode_graphs(*, model_runner: ModelRunner) -> GraphCapture:
    """Capture nothing."""
    return _nothing_captured(None, "target_verify")


def prefill_graphs(
    original: Callable[..., object], *, model_runner: ModelRunner, eager_runner: object, **others: object
) -> object:
    """Around SGLang's capture: go on without where it fails, or where it would lose the hidden states."""
    try:
        if not _lose_states():
            return original(model_runner=model_runner, eager_runner=eager_runner, **others)
    except Exception as error:
        if get_parallel().tp_size > 1:  # ranks capture in step: the others wait for this one
            raise
        logger.warning("DSPARK: prefill without CUDA graphs: they cannot be captured here: %s", error)
    return _nothing_captured(eager_runner, "prefill")


def _lose_states() -> bool:
    """Return whether the graphs of prefill that SGLang has chosen return no hidden states; says so."""
    if any(check_cuda_graph_backend(Phase.PREFILL, backend) for backend in (Backend.DISABLED, Backend.BREAKABLE)):
        return False
    logger.warning("DSPARK: prefill without CUDA graphs: those that SGLang has chosen return no hidden states")
    return True


def _nothing_captured(runner: object, phase: str) -> GraphCapture:
    return GraphCapture(runner=runner, memory_phase=phase, memory_usage_gb=0, capture_time=0)
