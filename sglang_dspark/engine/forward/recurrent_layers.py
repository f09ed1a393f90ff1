"""Verify with layers that keep a recurrent state: verification reads the states, the commit advances them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

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

Parts = TypeVar("Parts", DeltaInputs, DeltaGates)


@dataclass(frozen=True)
class LayerRows:
    """The inputs of a verification's rows to one layer, until the commit.

    Attributes:
        convolved: [N, C] inputs of its convolution.
        delta: inputs of its recurrence.
        gates: weights of its decay.
    """

    convolved: torch.Tensor
    delta: DeltaInputs
    gates: DeltaGates


class RecurrentBackend:
    """Encode prompts with SGLang's own backend of gated delta nets, and verify ragged rows.

    SGLang verifies as many rows for every request, keeps a state after each, and overwrites the windows. Here a
    verification leaves states and windows as they are. :meth:`advance` then runs the accepted rows again.

    Args:
        prompts: SGLang's own backend, which answers whatever else SGLang asks.
    """

    supports_packed_verify = False  # its models would hand over what the convolution is yet to be given

    def __init__(self, prompts: Any) -> None:
        self._prompts, self._pool = prompts, prompts.req_to_token_pool
        self._rows: StateRows | None = None
        self._layers: dict[int, LayerRows] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._prompts, name)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare a forward."""
        if not forward_batch.forward_mode.is_target_verify():
            self._prompts.init_forward_metadata(forward_batch)
            return
        slots = self._pool.translate_mamba_indices(self._pool.get_mamba_indices(forward_batch.req_pool_indices))
        self._rows, self._layers = StateRows(forward_batch.spec_info.indptr, slots), {}

    def forward_extend(
        self, layer: Any, forward_batch: Any, mixed_qkv: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        """Return [1, tokens, HV, V] of one layer.

        Args:
            mixed_qkv: [tokens, C] queries, keys and values before the convolution.
            a: [tokens, HV], of the decay.
            b: [tokens, HV], of the strength of the update.
        """
        if not forward_batch.forward_mode.is_target_verify():
            return self._prompts.forward_extend(
                layer=layer, forward_batch=forward_batch, mixed_qkv=mixed_qkv, a=a, b=b, **kwargs
            )
        assert self._rows is not None, "a forward is prepared first"
        index = self._pool.mamba2_layer_index(layer.layer_id)
        windows, states = self._windows_and_states()
        convolved = causal_conv_rows(mixed_qkv, layer.conv_weights, layer.bias, windows[index], self._rows)
        q, k, v = convolved.split([layer.q_dim, layer.k_dim, layer.v_dim], dim=-1)
        delta = DeltaInputs(k.unflatten(1, (layer.num_k_heads, -1)), v.unflatten(1, (layer.num_v_heads, -1)), a, b)
        gates = DeltaGates(layer.A_log, layer.dt_bias)
        self._layers[index] = LayerRows(mixed_qkv, delta, gates)
        return gated_delta(q.unflatten(1, (layer.num_q_heads, -1)), delta, gates, states[index], self._rows)[None]

    def advance(self, lengths: torch.Tensor) -> None:
        """Advance states and windows by the first rows of the verification before.

        Args:
            lengths: [bs] int, of each request: its anchor and the accepted drafts.
        """
        assert self._rows is not None, "a verification comes first"
        windows, states = self._windows_and_states()
        layers = [self._layers.pop(index) for index in range(len(states))]
        rows = ReplayedRows(self._rows.indptr, self._rows.slots, lengths)
        inputs, gates = _stacked([layer.delta for layer in layers]), _stacked([layer.gates for layer in layers])
        commit_gated_delta(inputs, gates, states, rows)
        commit_conv_windows(torch.stack([layer.convolved for layer in layers]), windows, rows)

    def _windows_and_states(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return [layers, slots, C, W - 1] and [layers, slots, HV, V, K]."""
        cache = self._pool.mamba_pool.mamba_cache
        return cache.conv[0], cache.temporal


def _stacked(parts: Sequence[Parts]) -> Parts:
    """Return the tensors of several layers, each stacked along a dimension in front."""
    columns = zip(*(vars(part).values() for part in parts), strict=True)
    return type(parts[0])(*(torch.stack(column) for column in columns))


def recurrent_backend(runner: Any) -> RecurrentBackend | None:
    """Return ours of the target's runner; None if its layers keep no states."""
    backend = getattr(runner.attn_backend, "linear_attn_backend", None)
    return backend if isinstance(backend, RecurrentBackend) else None
