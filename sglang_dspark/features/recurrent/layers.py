"""Verify with layers that keep a recurrent state, eagerly and in captured steps."""

from __future__ import annotations

import logging
from typing import Any

import torch
from dspark_kernels import StateRows
from sglang.srt.layers.attention.hybrid_linear_attn_backend import MambaAttnBackendBase
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from sglang.srt.runtime_context import get_exec, mamba_track_grid
from sglang.srt.speculative.spec_utils import prepare_mamba_track_for_verify

from sglang_dspark.engine.sglang_types import ForwardBatch, ModelRunner, ScheduleBatch
from sglang_dspark.engine.target import row_bounds
from sglang_dspark.features.recurrent.rows import RecordedRows, StatePools, Tracks, VerifiedRows
from sglang_dspark.step.state import VerifyPlan

logger = logging.getLogger(__name__)


class RecurrentBackend:
    """Encode prompts with SGLang's own backend of gated delta nets, and verify ragged rows.

    SGLang verifies as many rows for every request, keeps a state after each, and overwrites the windows. Here a
    verification leaves states and windows as they are, and the commit runs the accepted rows again.

    Args:
        prompts: SGLang's own backend, which answers whatever else SGLang asks.
        dtype: of the target's hidden states.
        track_interval: tokens between two states that the radix cache gets of a text; None if it gets the last one.
    """

    supports_packed_verify = False  # its models would hand over what the convolution is yet to be given

    def __init__(self, prompts: MambaAttnBackendBase, dtype: torch.dtype, track_interval: int | None = None) -> None:
        self.prompts, self._pool = prompts, prompts.req_to_token_pool
        self._dtype, self.track_interval = dtype, track_interval
        self._recorded: RecordedRows | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.prompts, name)

    @classmethod
    def beside(cls, prompts: MambaAttnBackendBase, runner: ModelRunner) -> RecurrentBackend:
        """Return ours of the target's runner, and log what its states take."""
        interval = int(mamba_track_grid(runner.page_size)) if get_exec().mamba.enable_mamba_extra_buffer else None
        backend = cls(prompts, runner.dtype, interval)
        logger.info(
            "DSPARK: %d slots of recurrent states of %.2f MB each, for %d requests at a time and the prefix cache",
            backend.num_states,
            backend.state_mb,
            runner.max_running_requests,
        )
        return backend

    @property
    def num_states(self) -> int:
        """Return how many states there are, beside the first, which is padding."""
        return int(self.pools.states.shape[1]) - 1

    @property
    def state_mb(self) -> float:
        """Return what a state takes, with the windows of its convolutions."""
        return float(self.pools.nbytes / (self.num_states + 1) / 2**20)

    @property
    def pools(self) -> StatePools:
        """Return the states of the target."""
        cache = self._pool.mamba_pool.mamba_cache
        return StatePools(cache.conv[0], cache.temporal)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Prepare a forward; for the layers and the commit of a verification, in ``spec_info.advance``."""
        if not forward_batch.forward_mode.is_target_verify():
            self.prompts.init_forward_metadata(forward_batch)
            return
        layout, pools = forward_batch.spec_info, self.pools
        bounds = row_bounds(layout, forward_batch.input_ids)
        rows = StateRows(bounds, self._slots(forward_batch.req_pool_indices))
        recorded = self._recorded_rows(len(forward_batch.input_ids))
        layout.advance = VerifiedRows(rows, pools, recorded, self._tracks(forward_batch))

    def _slots(self, req_pool_indices: torch.Tensor) -> torch.Tensor:
        """Return [bs] slots of the requests' states, as the device knows them."""
        slots: torch.Tensor = self._pool.translate_mamba_indices(self._pool.get_mamba_indices(req_pool_indices))
        return slots

    def _recorded_rows(self, num_rows: int) -> RecordedRows:
        if self._recorded is None or num_rows > self._recorded.num_rows:
            return RecordedRows.empty(self.pools, num_rows, self._dtype)
        return self._recorded.first(num_rows)

    def hold_rows(self, num_rows: int) -> None:
        """Have verifications of up to so many rows record them in one memory: each commit comes before the next one."""
        self._recorded = RecordedRows.empty(self.pools, num_rows, self._dtype)

    def _tracks(self, forward_batch: ForwardBatch) -> Tracks | None:
        slots = forward_batch.mamba_track_indices
        if self.track_interval is None or slots is None:  # SGLang's dummy forwards have none
            return None
        return Tracks(self._pool.translate_mamba_indices(slots), forward_batch.seq_lens, self.track_interval)

    def forward_extend(
        self,
        layer: RadixLinearAttention,
        forward_batch: ForwardBatch,
        mixed_qkv: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        **kwargs: object,
    ) -> torch.Tensor:
        """Return [1, tokens, HV, V] of one layer.

        Args:
            mixed_qkv: [tokens, C] queries, keys and values before the convolution.
            a: [tokens, HV], of the decay.
            b: [tokens, HV], of the strength of the update.
        """
        if not forward_batch.forward_mode.is_target_verify():
            return self.prompts.forward_extend(
                layer=layer, forward_batch=forward_batch, mixed_qkv=mixed_qkv, a=a, b=b, **kwargs
            )
        verified: VerifiedRows = forward_batch.spec_info.advance
        return verified.outputs(self._pool.mamba2_layer_index(layer.layer_id), layer, mixed_qkv, a, b)[None]


class CapturedStates:
    """Hold where the radix cache wants states of requests whose steps are replayed.

    Args:
        backend: of the target.
        requests: slots of the largest captured step.
        rows: of the largest captured verification.
    """

    def __init__(self, backend: RecurrentBackend, requests: int, rows: int) -> None:
        self._backend = backend
        self._track_slots = torch.full((requests,), -1, device=backend.pools.states.device)
        backend.hold_rows(rows)

    def prepare(self, plan: VerifyPlan, forward_batch: ForwardBatch) -> None:
        """Find the states of the requests, as a part of a captured verification."""
        forward_batch.mamba_track_indices = self._track_slots[: len(forward_batch.req_pool_indices)]
        self._backend.init_forward_metadata(forward_batch)

    def stage(self, batch: ScheduleBatch | None) -> None:
        """Copy where the radix cache wants the next states of SGLang's batch, for the next replay.

        Args:
            batch: None in a step that is measured, whose requests have padding alone for states.
        """
        if self._backend.track_interval is not None and batch is not None:
            prepare_mamba_track_for_verify(batch)
            self._track_slots[: len(batch.mamba_track_indices)] = batch.mamba_track_indices
