"""What the stages of a decode step hand to each other.

Letters: bs requests; gamma drafts per block; N tokens in the verify forward, flattened request by request; V
vocabulary. Tensors live on the worker's device unless their name ends in ``_cpu``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from dspark_kernels import DraftBlock, RoundKeys, SamplingRows, StepRequests, VerifyRows

from sglang_dspark.step.choice import Choice
from sglang_dspark.step.transfers import host_index


@dataclass(frozen=True)
class DecodeBatch:
    """A step's requests, read from SGLang's batch by ``engine.batch.read_decode_batch``."""

    anchors: torch.Tensor  # [bs] int64, last committed token, at position prefix_lens
    prefix_lens: torch.Tensor  # [bs] int64, tokens whose K/V is committed
    req_pool_indices: torch.Tensor  # [bs] int64, rows of req_to_token
    req_to_token: torch.Tensor  # [rows, columns] int32, K/V slot of every position of every request
    rows: SamplingRows
    keys: RoundKeys
    adjusted: bool = False  # whether the target's logits are adjusted between verification and acceptance

    def __len__(self) -> int:
        return self.anchors.shape[0]

    @property
    def requests(self) -> StepRequests:
        """The same for the kernels, all requests real."""
        return StepRequests(self.anchors, self.prefix_lens, self.req_pool_indices, self.req_to_token)

    def take(self, index: torch.Tensor, rows: SamplingRows) -> DecodeBatch:
        """The step of the requests ``index`` [m] int64 alone; ``rows`` are their sampling parameters."""
        return DecodeBatch(
            anchors=self.anchors[index],
            prefix_lens=self.prefix_lens[index],
            req_pool_indices=self.req_pool_indices[index],
            req_to_token=self.req_to_token,
            rows=rows,
            keys=self.keys.take(index),
            adjusted=self.adjusted,
        )


@dataclass(frozen=True)
class Copies:
    """Drafts that presets propose instead of the drafter's.

    Attributes:
        tokens: [bs, width] int64, fillers where nothing is proposed.
        lens: drafts proposed per request.
    """

    tokens: torch.Tensor
    lens: tuple[int, ...]

    @property
    def mask(self) -> torch.Tensor:
        """[bs, width] bool, which of ``tokens`` are proposed."""
        lens = host_index(self.lens, self.tokens.device)
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < lens[:, None]


@dataclass(frozen=True)
class Drafted:
    """What the draft stage proposes.

    Attributes:
        block: the drafts, [bs, depth]; None for a plain step.
        predictions: [2, bs, depth] float32, the confidence head's raw logits (NaN without one) and the calibrated
            survivals: the probability that a draft and all before it are accepted; None where nobody asked.
        depths: drafts proposed per request; rows of requests without any hold fillers.
    """

    block: DraftBlock | None
    predictions: torch.Tensor | None
    depths: list[int]

    def with_copies(self, copies: Copies | None) -> Drafted:
        """The same with drafts that presets propose."""
        if copies is None:
            return self
        if self.block is None:
            block = DraftBlock(copies.tokens, None, None, copied=copies.mask)
        else:
            block = self.block.with_copies(copies.tokens, copies.mask)
        return replace(self, block=block)

    @property
    def width(self) -> int:
        """Drafts that the block has room for."""
        if self.block is not None:
            return self.block.tokens.shape[1]
        return 0 if self.predictions is None else self.predictions.shape[2]

    @property
    def device(self) -> torch.device:
        """Where the drafts are."""
        tensor = self.predictions if self.block is None else self.block.tokens
        assert tensor is not None, "a plain step has no drafts"
        return tensor.device

    @property
    def survival(self) -> torch.Tensor | None:
        """[bs, depth] of ``predictions``."""
        return None if self.predictions is None else self.predictions[1]

    @property
    def raw_confidence(self) -> torch.Tensor | None:
        """[bs, depth] the head's own probability that a draft is accepted, given that all before it are."""
        logits = None if self.block is None else self.block.confidence_logits
        return None if logits is None else logits.sigmoid()


@dataclass(frozen=True)
class VerifyPlan(VerifyRows):
    """Which drafts are verified, and the flattened tokens.

    Attributes:
        lens_cpu: ``verify_lens`` on the host, where the worker runs there.
        width: bound on the rows of a request, anchor included.
    """

    lens_cpu: list[int] | None
    width: int


@dataclass(frozen=True)
class Rounds:
    """What a step did, for statistics, calibration and traces. On the host by the time SGLang processes the result.

    Attributes:
        requests: ids of the step's requests.
        choice: what the policy had decided.
        drafted: drafts proposed per request.
        verify_lens: [bs] int64, drafts verified per request.
        predictions: as in :class:`Drafted`.
        traced: [bs, 2 + depth] int64: context length, anchor and drafts; None when no request wants a trace.
        copied: drafts that a preset proposed, per request; those requests count as not drafted.
        policy, parked: name of the policy that chose, and whether it let speculation rest.
    """

    requests: list[str]
    choice: Choice
    drafted: list[int]
    verify_lens: torch.Tensor
    predictions: torch.Tensor | None
    traced: torch.Tensor | None
    copied: Sequence[int]
    policy: str = "auto"
    parked: bool = False
