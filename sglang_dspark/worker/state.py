"""What the stages of a decode step hand to each other.

Letters: bs requests; gamma drafts per block; N tokens in the verify forward, flattened request by request; V
vocabulary. Tensors live on the worker's device unless their name ends in ``_cpu``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from dspark_kernels import RoundKeys, SamplingRows


@dataclass(frozen=True)
class DecodeBatch:
    """A step's requests. Set by ``engine.batch.read_decode_batch``."""

    anchors: torch.Tensor  # [bs] int64, last committed token, at position prefix_lens
    prefix_lens: torch.Tensor  # [bs] int64, tokens whose K/V is committed
    req_pool_indices: torch.Tensor  # [bs] int64, rows of req_to_token
    block_positions: torch.Tensor  # [bs, gamma + 1] int64, prefix_lens + 0..gamma
    window_slots: torch.Tensor  # [bs, verify_len + 1] int64, K/V slots of the first of these positions
    rows: SamplingRows
    keys: RoundKeys

    def __len__(self) -> int:
        return self.anchors.shape[0]


@dataclass(frozen=True)
class VerifyPlan:
    """Which drafts are verified, and the flattened tokens. Set by ``worker.verify_plan``."""

    verify_lens: torch.Tensor  # [bs] int64, drafts verified per request, 0..gamma
    lens_cpu: list[int] | None  # the same on the host, where the host decided ragged lengths
    width: int  # rows of the widest request, anchor included
    indptr: torch.Tensor  # [bs + 1] int64, first row of each request
    requests: torch.Tensor  # [N] int64, request of each row
    columns: torch.Tensor  # [N] int64, place of each row in its request's window: 0 is the anchor
    input_ids: torch.Tensor  # [N] int64
    positions: torch.Tensor  # [N] int64
    slots: torch.Tensor  # [N] int64


@dataclass(frozen=True)
class Rounds:
    """What a step did, for counters and traces. On the host by the time SGLang processes the result.

    Attributes:
        num_drafted: drafts proposed per request.
        verify_lens: [bs] int64, drafts verified per request.
        traced: [bs, 2 + num_drafted] int64: context length, anchor and drafts; None when no request wants a trace.
    """

    num_drafted: int
    verify_lens: torch.Tensor
    traced: torch.Tensor | None
