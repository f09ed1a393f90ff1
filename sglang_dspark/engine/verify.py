"""The target's forward over the tokens to be verified."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dspark_kernels.ragged_attention import ContextGroup, group_contexts
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.dflash_info import DFlashVerifyInput

from sglang_dspark.worker.state import DecodeBatch, VerifyPlan


@dataclass
class DSparkVerifyInput(DFlashVerifyInput):
    """SGLang's verify input; on the CPU with the layout that :class:`CpuVerifyBackend` reads."""

    groups: list[ContextGroup] = field(default_factory=list)


def run_verify(target_worker: Any, batch: Any, decode: DecodeBatch, plan: VerifyPlan) -> tuple[Any, bool]:
    """Run the target over ``plan``'s tokens.

    Returns:
        ``(logits_output, used_cuda_graph)``; ``logits_output.next_token_logits`` is [N, V] and
        ``logits_output.hidden_states`` [N, taps * d].
    """
    verify_input = DSparkVerifyInput(
        draft_token=plan.input_ids,
        positions=plan.positions,
        draft_token_num=plan.width,
        capture_hidden_mode=CaptureHiddenMode.FULL,
    )
    if plan.lens_cpu is not None:
        verify_input.groups = _context_groups(target_worker.model_runner, decode, plan.lens_cpu)
    batch.out_cache_loc = plan.slots
    # Backends that plan on the host need a bound of context plus window. SGLang restores the batch's fields afterwards.
    if batch.seq_lens_cpu is not None:
        batch.seq_lens_cpu = batch.seq_lens_cpu + plan.width
    else:
        batch.seq_lens_cpu = batch.spec_info.reserved_lens_cpu
    batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
    forward_batch, _ = verify_input.prepare_for_verify(batch, target_worker)
    result = target_worker.forward_batch_generation(
        batch=None, forward_batch=forward_batch, is_verify=True, skip_attn_backend_init=True
    )
    return result.logits_output, result.can_run_cuda_graph


def _context_groups(runner: Any, decode: DecodeBatch, verify_lens: list[int]) -> list[ContextGroup]:
    query_lens = [verify_len + 1 for verify_len in verify_lens]
    config = runner.model_config
    return group_contexts(
        runner.req_to_token_pool.req_to_token,
        decode.req_pool_indices.tolist(),
        [prefix + num for prefix, num in zip(decode.prefix_lens.tolist(), query_lens, strict=True)],
        query_lens,
        causal=True,
        heads_per_kv=config.num_attention_heads // config.get_total_num_kv_heads(),
        dtype=runner.dtype,
    )
