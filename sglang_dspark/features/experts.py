"""Experts that a target has routed the tokens of a text to, as SGLang returns them (``return_routed_experts``).

SGLang looks for the experts of a text by K/V slot. A slot whose draft was rejected holds the next step's token soon,
with its experts. So what SGLang reads by the slots of a complete text are the rows that were accepted.
"""

from __future__ import annotations

from types import SimpleNamespace

from sglang.srt.state_capturer.base import BaseDeviceCache
from sglang.srt.state_capturer.routed_experts import RoutedExpertsCapturer, get_global_experts_capturer

from sglang_dspark.engine.feature import Feature, FlagRule, off_gpu
from sglang_dspark.engine.part import Part, Worker
from sglang_dspark.engine.sglang_types import GenerationBatchResult
from sglang_dspark.step.state import VerifyPlan


class RoutedExperts(Part):
    """Hand SGLang the experts of each verification.

    Args:
        worker: ours.
    """

    _capturer: RoutedExpertsCapturer

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def attention_made(self) -> None:
        """Make room for the rows of the largest step: SGLang's has room for one row of each request."""
        self._capturer = get_global_experts_capturer()
        runner, cache = self._worker.model_runner, self._capturer.device_cache
        rows = runner.max_running_requests * (self._worker.max_verify + 1)
        if len(cache.buffer) < rows:
            sizes = cache.num_layers, cache.topk_size
            self._capturer.device_cache = BaseDeviceCache(rows, *sizes, self._worker.device, cache.name)

    def step_launched(self, plan: VerifyPlan, result: GenerationBatchResult) -> None:
        """Have the experts of the rows copied with the tokens."""
        result.routed_experts_output = self._capturer.on_forward_end(
            forward_batch=SimpleNamespace(out_cache_loc=plan.slots, out_cache_loc_virtual=None),  # all that it reads
            can_run_graph=False,
            cuda_graph_batch=None,
            no_copy_to_cpu=not self._worker.server_args.disable_overlap_schedule,
        )


FEATURE = Feature(
    __name__,
    is_used=lambda args: args.enable_return_routed_experts,
    flag_rules=(
        FlagRule(
            "enable_return_routed_experts",
            (False,),
            "drop the flag: SGLang keeps the experts of tokens in pinned memory, which PyTorch has only with a GPU",
            applies=off_gpu,
        ),
    ),
    part=RoutedExperts,
)
