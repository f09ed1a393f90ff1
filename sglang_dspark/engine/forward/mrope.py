"""Positions of three coordinates (mRoPE), for the rows of a verification.

Behind the pictures of a prompt all three coordinates of a token are its position and a delta, which belongs to the
request. Prefill writes it to a table on the device, from which steps read it: eager ones and captured ones alike.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_dspark.step.transfers import host_index


def make_table(runner: Any) -> None:
    """Give the target's runner the table, [request slots] int64, before any graph is captured."""
    if runner.model_config.model_is_mrope:
        slots = len(runner.req_to_token_pool.req_to_token)
        runner.mrope_deltas = torch.zeros(slots, dtype=torch.int64, device=runner.device)


def keep_deltas(runner: Any, batch: Any) -> None:
    """Enter the requests of a prefill. No host sync.

    A request slot that is taken again is entered again: every request passes a prefill.
    """
    if runner.model_config.model_is_mrope:
        deltas = [0 if inputs is None else int(inputs.mrope_position_delta) for inputs in batch.multimodal_inputs]
        runner.mrope_deltas[batch.req_pool_indices] = host_index(deltas, runner.mrope_deltas.device)


def place_rows(forward_batch: Any, runner: Any, batch: Any = None, seq_positions: Any = None) -> None:
    """Give the rows of a verification their coordinates, [3, N] int64. No host sync; safe under graph capture."""
    deltas = runner.mrope_deltas[forward_batch.req_pool_indices][forward_batch.spec_info.requests]
    forward_batch.mrope_positions = (forward_batch.positions + deltas).repeat(3, 1)
