"""The target's forward over the tokens to be verified."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from dspark_kernels import ContextGroup, VisibleKeys, group_contexts
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.dflash_info import DFlashVerifyInput

from sglang_dspark.engine.forward.layers import kv_heads_of_rank
from sglang_dspark.engine.forward.recurrent_layers import recurrent_backend
from sglang_dspark.step.state import DecodeBatch, TargetOutput, VerifyPlan


@dataclass
class DSparkVerifyInput(DFlashVerifyInput):
    """SGLang's verify input, with the layout of ragged rows.

    Attributes:
        indptr: [bs + 1] int64, first row of each request; what :class:`CudaVerifyBackend` reads.
        requests: [N] int64, request of each row.
        groups: what :class:`CpuVerifyBackend` reads: the layout for layers with such a sliding window, or None.
    """

    indptr: torch.Tensor | None = None
    requests: torch.Tensor | None = None
    groups: Callable[[int | None], list[ContextGroup]] | None = None


def run_verify(target_worker: Any, decode: DecodeBatch, plan: VerifyPlan) -> TargetOutput:
    """Run the target over ``plan``'s tokens, eagerly."""
    batch = decode.batch
    verify_input = DSparkVerifyInput(
        draft_token=plan.input_ids,
        positions=plan.positions,
        draft_token_num=plan.width,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        indptr=plan.indptr,
        requests=plan.requests,
    )
    if plan.verify_lens.device.type == "cpu":
        verify_input.groups = _context_groups(target_worker.model_runner, decode, plan.verify_lens.tolist())
    batch.out_cache_loc = plan.slots
    # Backends that plan on the host need a bound of context plus window. SGLang restores the batch's fields afterwards.
    if batch.seq_lens_cpu is not None:
        batch.seq_lens_cpu = batch.seq_lens_cpu + plan.width
    else:
        batch.seq_lens_cpu = batch.spec_info.nxt_kv_lens_cpu
    batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
    forward_batch, _ = verify_input.prepare_for_verify(batch, target_worker)
    result = target_worker.forward_batch_generation(
        batch=None, forward_batch=forward_batch, is_verify=True, skip_attn_backend_init=True
    )
    output = result.logits_output
    captured, output.hidden_states = output.hidden_states, None
    recurrent = recurrent_backend(target_worker.model_runner)
    return TargetOutput(output, captured, None if recurrent is None else recurrent.advance)


def _context_groups(
    runner: Any, decode: DecodeBatch, verify_lens: list[int]
) -> Callable[[int | None], list[ContextGroup]]:
    """Return the layout of a step, made once for each kind of layer."""
    query_lens = [verify_len + 1 for verify_len in verify_lens]
    config = runner.model_config
    heads = config.num_attention_heads // get_parallel().tp_size  # of this rank, as those of K/V

    @cache
    def groups(sliding_window: int | None) -> list[ContextGroup]:
        return group_contexts(
            runner.req_to_token_pool.req_to_token,
            decode.req_pool_indices.tolist(),
            [prefix + num for prefix, num in zip(decode.prefix_lens.tolist(), query_lens, strict=True)],
            query_lens,
            VisibleKeys(causal=True, sliding_window=sliding_window),
            heads_per_kv=heads // kv_heads_of_rank(config),
            dtype=runner.dtype,
        )

    return groups
