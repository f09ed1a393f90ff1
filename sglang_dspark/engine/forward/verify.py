"""The target's forward over the tokens to be verified."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from dspark_kernels import ContextGroup, VisibleKeys, group_contexts
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.dflash_info import DFlashVerifyInput

from sglang_dspark.engine.forward.layers import slot_translation
from sglang_dspark.engine.sglang_types import ModelRunner, TpModelWorker
from sglang_dspark.step.state import DecodeBatch, TargetOutput, VerifyPlan


@dataclass
class DSparkVerifyInput(DFlashVerifyInput):
    """SGLang's verify input, with the layout of ragged rows.

    Attributes:
        indptr: [bs + 1] int64, first row of each request; what :class:`CudaVerifyBackend` reads.
        requests: [N] int64, request of each row.
        groups: what :class:`CpuVerifyBackend` reads: the layout for layers of a kind.
        slots_of_windows: [N] int64, where the rows' K/V lie in the pool of layers with a window; None if there is none.
        advance: what becomes :attr:`TargetOutput.advance`; set by backends of layers that keep something of the rows.
    """

    indptr: torch.Tensor | None = None
    requests: torch.Tensor | None = None
    groups: Callable[..., list[ContextGroup]] | None = None
    slots_of_windows: torch.Tensor | None = None
    advance: Callable[[torch.Tensor], None] | None = None


def slots_of_windows(runner: ModelRunner, slots: torch.Tensor) -> torch.Tensor | None:
    """Return :attr:`DSparkVerifyInput.slots_of_windows` of rows with these slots [N]."""
    translation = slot_translation(runner.token_to_kv_pool)
    return None if translation is None else translation[slots]


def run_verify(target_worker: TpModelWorker, decode: DecodeBatch, plan: VerifyPlan) -> TargetOutput:
    """Run the target over ``plan``'s tokens, eagerly."""
    batch = decode.batch
    verify_input = DSparkVerifyInput(
        draft_token=plan.input_ids,
        positions=plan.positions,
        draft_token_num=plan.width,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        indptr=plan.indptr,
        slots_of_windows=slots_of_windows(target_worker.model_runner, plan.slots),
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
    return TargetOutput(output, captured, verify_input.advance)


def _context_groups(
    runner: ModelRunner, decode: DecodeBatch, verify_lens: list[int]
) -> Callable[..., list[ContextGroup]]:
    """Return the layout of a step, made once for each kind of layer."""
    query_lens = [verify_len + 1 for verify_len in verify_lens]

    @cache
    def groups(
        sliding_window: int | None, translation: torch.Tensor | None, *, heads_per_kv: int
    ) -> list[ContextGroup]:
        return group_contexts(
            runner.req_to_token_pool.req_to_token,
            decode.req_pool_indices.tolist(),
            [prefix + num for prefix, num in zip(decode.prefix_lens.tolist(), query_lens, strict=True)],
            query_lens,
            VisibleKeys(causal=True, sliding_window=sliding_window, translation=translation),
            heads_per_kv=heads_per_kv,
            dtype=runner.dtype,
        )

    return groups
