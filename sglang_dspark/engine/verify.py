"""The target's forward over the tokens to be verified."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from dspark_kernels.ragged_attention import SlotIndex, slot_index
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.dflash_info import DFlashVerifyInput

from sglang_dspark.worker.state import DecodeBatch, VerifyPlan


@dataclass(frozen=True)
class VerifyRow:
    """One request's rows in a ragged verification on the CPU."""

    start: int
    end: int
    keys: SlotIndex  # pool rows of its whole context including the rows being verified


@dataclass
class DSparkVerifyInput(DFlashVerifyInput):
    """SGLang's verify input; on the CPU with the layout that :class:`CpuVerifyBackend` reads."""

    rows: list[VerifyRow] = field(default_factory=list)


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
        verify_input.rows = _ragged_rows(batch.req_to_token_pool.req_to_token, decode, plan.lens_cpu)
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


def _ragged_rows(req_to_token: torch.Tensor, decode: DecodeBatch, lens: list[int]) -> list[VerifyRow]:
    rows, start = [], 0
    prefixes = decode.prefix_lens.tolist()
    for request, prefix, verify_len in zip(decode.req_pool_indices.tolist(), prefixes, lens, strict=True):
        end = start + 1 + verify_len
        keys = req_to_token[request, : prefix + 1 + verify_len].to(torch.int64)
        rows.append(VerifyRow(start, end, slot_index(keys)))
        start = end
    return rows
