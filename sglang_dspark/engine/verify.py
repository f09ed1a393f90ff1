"""The target's forward over the tokens to be verified."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from dspark_kernels.ragged_attention import ContextGroup, group_contexts
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.dflash_info import DFlashVerifyInput

from sglang_dspark.worker.state import DecodeBatch, VerifyPlan


@dataclass
class DSparkVerifyInput(DFlashVerifyInput):
    """SGLang's verify input, with the layout of ragged rows.

    Attributes:
        indptr: [bs + 1] int64, first row of each request; what :class:`CudaVerifyBackend` reads.
        groups: what :class:`CpuVerifyBackend` reads.
    """

    indptr: torch.Tensor | None = None
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
        indptr=plan.indptr,
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
    with _graphs_that_fit(target_worker.model_runner, plan):
        forward_batch, _ = verify_input.prepare_for_verify(batch, target_worker)
        result = target_worker.forward_batch_generation(
            batch=None, forward_batch=forward_batch, is_verify=True, skip_attn_backend_init=True
        )
    return result.logits_output, result.can_run_cuda_graph


@contextmanager
def _graphs_that_fit(runner: Any, plan: VerifyPlan) -> Iterator[None]:
    """Hide the stock CUDA graphs from a forward of another shape: they look at the number of requests only."""
    graphs = runner.decode_cuda_graph_runner
    if not (plan.uniform and plan.width == runner.server_args.speculative_num_draft_tokens):
        runner.decode_cuda_graph_runner = None
    try:
        yield
    finally:
        runner.decode_cuda_graph_runner = graphs


def _context_groups(runner: Any, decode: DecodeBatch, verify_lens: list[int]) -> list[ContextGroup]:
    query_lens = [verify_len + 1 for verify_len in verify_lens]
    config, ranks = runner.model_config, runner.tp_size
    return group_contexts(
        runner.req_to_token_pool.req_to_token,
        decode.req_pool_indices.tolist(),
        [prefix + num for prefix, num in zip(decode.prefix_lens.tolist(), query_lens, strict=True)],
        query_lens,
        causal=True,
        # Of this rank: with more ranks than K/V heads, several hold the same one.
        heads_per_kv=config.num_attention_heads // ranks // config.get_num_kv_heads(ranks),
        dtype=runner.dtype,
    )
