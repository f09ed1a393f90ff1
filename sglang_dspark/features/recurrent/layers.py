"""Verifies with layers that keep a recurrent state, eagerly and in captured steps.

The rows of a verification are recorded, and the commit runs the accepted ones again.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from dspark_kernels import (
    DeltaGates,
    DeltaInputs,
    ReplayedRows,
    StateRows,
    causal_conv_rows,
    commit_conv_windows,
    commit_gated_delta,
    gated_delta,
)
from sglang.srt.layers.attention.hybrid_linear_attn_backend import MambaAttnBackendBase
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from sglang.srt.runtime_context import get_exec, mamba_track_grid
from sglang.srt.speculative.spec_utils import prepare_mamba_track_for_verify

from sglang_dspark.engine.sglang_types import ForwardBatch, ModelRunner, ScheduleBatch
from sglang_dspark.engine.target import row_bounds
from sglang_dspark.step.state import VerifyPlan

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StatePools:
    """The states of all recurrent layers of a target.

    Attributes:
        windows: [L, slots, C, W - 1], of the convolutions.
        states: [L, slots, HV, V, K].
    """

    windows: torch.Tensor
    states: torch.Tensor


@dataclass(frozen=True)
class RecordedRows:
    """Hold what the rows of a verification bring to its recurrent layers, until the commit.

    Attributes:
        inputs: [L, N, C] of the convolutions.
        convolved: [L, N, C] queries, keys and values.
        a: [L, N, HV], of the decays.
        b: [L, N, HV], of the strengths of the updates.
    """

    inputs: torch.Tensor
    convolved: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor

    @classmethod
    def empty(cls, pools: StatePools, num_rows: int, dtype: torch.dtype) -> RecordedRows:
        """Return buffers for so many rows."""
        num_layers, _, num_channels, _ = pools.windows.shape
        inputs, convolved = pools.windows.new_empty((2, num_layers, num_rows, num_channels), dtype=dtype)
        a, b = pools.windows.new_empty((2, num_layers, num_rows, pools.states.shape[2]), dtype=dtype)
        return cls(inputs, convolved, a, b)

    def first(self, num_rows: int) -> RecordedRows:
        """Return the part of the first rows."""
        return RecordedRows(*(part[:, :num_rows] for part in vars(self).values()))


@dataclass(frozen=True)
class Tracks:
    """Name the slots at which the radix cache gets states from the middle of a text.

    Attributes:
        slots: [bs] int64, a second slot of each request; below 0 none is stored.
        prefix_lens: [bs] int64, tokens that the state of a request has seen.
        interval: tokens between two such states.
    """

    slots: torch.Tensor
    prefix_lens: torch.Tensor
    interval: int

    def lengths(self, rows: torch.Tensor) -> torch.Tensor:
        """Return [bs] int64: the rows after which a state is stored; below 1 if the first ``rows`` [bs] pass none."""
        before = self.prefix_lens[: len(rows)]
        return (before + rows) // self.interval * self.interval - before


@dataclass(frozen=True)
class VerifiedRows:
    """The rows of one verification in all recurrent layers. Called with [bs] lengths, it advances the states.

    A captured verification has one of its own, whose tensors stay where they are.

    Attributes:
        rows: which rows a request has, and the slot of its states.
        pools: the states.
        recorded: what the rows bring.
        tracks: None if no states from the middle of a text are kept.
        layers: SGLang's layers by their index in the pools.
    """

    rows: StateRows
    pools: StatePools
    recorded: RecordedRows
    tracks: Tracks | None
    layers: dict[int, RadixLinearAttention] = field(default_factory=dict)

    def outputs(
        self, index: int, layer: RadixLinearAttention, mixed_qkv: torch.Tensor, a: torch.Tensor, b: torch.Tensor
    ) -> torch.Tensor:
        """Return [N, HV, V] of one layer, and leave its states alone.

        Args:
            index: of the layer, in the pools.
            layer: SGLang's.
            mixed_qkv: [N, C] queries, keys and values before the convolution.
            a: [N, HV], of the decay.
            b: [N, HV], of the strength of the update.
        """
        recorded = RecordedRows(*(part[index] for part in vars(self.recorded).values()))
        for kept, given in ((recorded.inputs, mixed_qkv), (recorded.a, a), (recorded.b, b)):
            assert kept.dtype == given.dtype, "what is replayed was rounded"
            kept.copy_(given)
        self.layers[index] = layer
        windows = self.pools.windows[index]
        causal_conv_rows(mixed_qkv, layer.conv_weights, layer.bias, windows, self.rows, recorded.convolved)
        queries = recorded.convolved[:, : layer.q_dim].unflatten(1, (layer.num_q_heads, -1))
        gates = DeltaGates(layer.A_log, layer.dt_bias)
        return gated_delta(queries, _inputs(layer, recorded), gates, self.pools.states[index], self.rows)

    def __call__(self, lengths: torch.Tensor) -> None:
        """Advance the states over the first rows of each request; requests after those given have no rows.

        Args:
            lengths: [bs] int, the anchor and the accepted drafts.
        """
        bs = len(lengths)
        tracked = () if self.tracks is None else (self.tracks.lengths(lengths), self.tracks.slots[:bs])
        rows = ReplayedRows(self.rows.indptr[: bs + 1], self.rows.slots[:bs], lengths, *tracked)
        layers = [self.layers[index] for index in range(len(self.pools.states))]
        weights = ([layer.A_log for layer in layers], [layer.dt_bias for layer in layers])
        gates = DeltaGates(*map(torch.stack, weights))
        commit_gated_delta(_inputs(layers[0], self.recorded), gates, self.pools.states, rows)
        commit_conv_windows(self.recorded.inputs, self.pools.windows, rows)


def _inputs(layer: RadixLinearAttention, recorded: RecordedRows) -> DeltaInputs:
    """Return the inputs to the states, of one layer or of all."""
    _, keys, values = recorded.convolved.split([layer.q_dim, layer.k_dim, layer.v_dim], dim=-1)
    keys, values = keys.unflatten(-1, (layer.num_k_heads, -1)), values.unflatten(-1, (layer.num_v_heads, -1))
    return DeltaInputs(keys, values, recorded.a, recorded.b)


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
    def of(cls, prompts: MambaAttnBackendBase, runner: ModelRunner) -> RecurrentBackend:
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
        """Return how many states there are, not counting the first, which is padding."""
        return int(self.pools.states.shape[1]) - 1

    @property
    def state_mb(self) -> float:
        """Return what a state takes, with the windows of its convolutions."""
        nbytes = sum(pool.nbytes for pool in vars(self.pools).values())
        return float(nbytes / (self.num_states + 1) / 2**20)

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
        # Slots of the requests' states, as the device knows them.
        slots = self._pool.translate_mamba_indices(self._pool.get_mamba_indices(forward_batch.req_pool_indices))
        rows = StateRows(bounds, slots)
        recorded = self._recorded_rows(len(forward_batch.input_ids))
        layout.advance = VerifiedRows(rows, pools, recorded, self._tracks(forward_batch))

    def _recorded_rows(self, num_rows: int) -> RecordedRows:
        if self._recorded is None or num_rows > self._recorded.inputs.shape[1]:
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
            batch: None in a step that is measured, whose requests have only padding for states.
        """
        if self._backend.track_interval is not None and batch is not None:
            prepare_mamba_track_for_verify(batch)
            self._track_slots[: len(batch.mamba_track_indices)] = batch.mamba_track_indices
