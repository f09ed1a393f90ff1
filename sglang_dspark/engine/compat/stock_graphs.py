"""Where SGLang captures the target's CUDA graphs when it starts, and how to have it capture none.

Methods of the model runner once. They are still there, but when it starts SGLang calls functions in their place.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_SETUP = "sglang.srt.model_executor.model_runner_components.cuda_graph_setup"


Replacement = Callable[..., Any]


def _has_setup() -> bool:
    return find_spec(_SETUP.rpartition(".")[0]) is not None and find_spec(_SETUP) is not None


def _no_method_decode(runner: Any) -> None:
    runner.decode_cuda_graph_runner = None
    runner.graph_mem_usage = 0


def _no_method_prefill(runner: Any) -> None:
    runner.prefill_cuda_graph_runner = runner.eager_runner


def _no_decode_capture(*, model_runner: Any) -> Any:
    return _nothing_captured(None, "target_verify")


def _no_prefill_capture(*, model_runner: Any, eager_runner: Any, **_unused: Any) -> Any:
    return _nothing_captured(eager_runner, "prefill")


def _nothing_captured(runner: Any, phase: str) -> Any:
    from sglang.srt.model_executor.model_runner_components.cuda_graph_setup import GraphCapture

    return GraphCapture(runner=runner, memory_phase=phase, memory_usage_gb=0, capture_time=0)


no_decode_graphs: Replacement
no_prefill_graphs: Replacement

if _has_setup():
    DECODE, no_decode_graphs = f"{_SETUP}.capture_decode_graph", _no_decode_capture
    PREFILL, no_prefill_graphs = f"{_SETUP}.capture_prefill_graph", _no_prefill_capture
else:
    DECODE, no_decode_graphs = f"{_RUNNER}.init_decode_cuda_graph", _no_method_decode
    PREFILL, no_prefill_graphs = f"{_RUNNER}.init_prefill_cuda_graph", _no_method_prefill
