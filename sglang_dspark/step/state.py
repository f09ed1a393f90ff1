"""Types that the stages of a decode step hand to each other.

Letters: bs requests; gamma drafts per block; N tokens in the verify forward, flattened request by request; V
vocabulary. Tensors live on the worker's device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from dspark_kernels import AcceptResult, ChainRules, DraftBlock, RoundKeys, SamplingBatch, StepRequests, VerifyRows

from sglang_dspark.step.packed import host_index


@dataclass(frozen=True)
class Confidence:
    """Confidences of a drafted step.

    Attributes:
        logits: [bs, depth] float32 of the confidence head, uncalibrated; None without one.
        survival: [bs, depth] float32, calibrated probability that a draft and all drafts before it are accepted.
    """

    logits: torch.Tensor | None
    survival: torch.Tensor

    def first(self, bs: int) -> Confidence:
        """Return those of the first ``bs`` requests."""
        return Confidence(None if self.logits is None else self.logits[:bs], self.survival[:bs])


@dataclass(frozen=True)
class DecodeBatch:
    """A step's requests, read from SGLang's batch by ``engine.batch.read_decode_batch``."""

    anchors: torch.Tensor  # [bs] int64, last committed token, at position prefix_lens
    prefix_lens: torch.Tensor  # [bs] int64, tokens whose K/V is committed
    req_pool_indices: torch.Tensor  # [bs] int64, rows of req_to_token
    req_to_token: torch.Tensor  # [rows, columns] int32, K/V slot of every position of every request
    rows: SamplingBatch
    keys: RoundKeys
    rules: ChainRules | None = None  # of the requests' chains; None for the usual ones
    keeps_logits: bool = False  # whether the target's output is adjusted before acceptance, or read after it
    batch: Any = None  # SGLang's, as its forward takes it
    rows_of: Callable[[Sequence[int]], SamplingBatch] | None = None  # of some of the requests

    def __len__(self) -> int:
        return self.anchors.shape[0]

    @property
    def requests(self) -> StepRequests:
        """Return the requests as the kernels take them, all of them real."""
        return StepRequests(self.anchors, self.prefix_lens, self.req_pool_indices, self.req_to_token)

    def drafting(self, requests: Sequence[int]) -> tuple[DecodeBatch, torch.Tensor]:
        """Return the step of only ``requests``, and their indices, [m] int64."""
        assert self.rows_of is not None, "a step that drafts for some requests knows their sampling parameters"
        index = host_index(requests, self.anchors.device)
        part = DecodeBatch(
            anchors=self.anchors[index],
            prefix_lens=self.prefix_lens[index],
            req_pool_indices=self.req_pool_indices[index],
            req_to_token=self.req_to_token,
            rows=self.rows_of(requests),
            keys=self.keys.take(index),
            rules=None if self.rules is None else self.rules.take(index),
            keeps_logits=self.keeps_logits,
        )
        return part, index


@dataclass(frozen=True)
class DraftOutput:
    """Drafts of all requests.

    Attributes:
        block: the drafts, [bs, depth]; of depth 0 in a non-speculative step.
        confidence: how sure the drafter is of its drafts; None if neither policy nor request asked.
        draft_lens: drafts proposed per request; rows of requests without any hold padding.
        planned: whether the graph that drafted has laid out the rows of the verification as well.
    """

    block: DraftBlock
    confidence: Confidence | None
    draft_lens: list[int]
    planned: bool = False

    @staticmethod
    def nothing(bs: int, device: torch.device) -> DraftOutput:
        """Return the draft of a non-speculative step."""
        return DraftOutput(DraftBlock.empty(bs, device), None, [0] * bs)

    def __len__(self) -> int:
        return len(self.draft_lens)

    @property
    def device(self) -> torch.device:
        """Return where the drafts are."""
        return self.block.tokens.device

    @property
    def survival(self) -> torch.Tensor:
        """Return [bs, depth] of ``confidence``, which the policy has asked for."""
        assert self.confidence is not None, "a policy that reads survivals asks for confidences"
        return self.confidence.survival

    @property
    def raw_confidence(self) -> torch.Tensor:
        """Return [bs, depth] the head's own probability that a draft is accepted, given that all before it are."""
        assert self.block.confidence_logits is not None, "thresholds are refused on a server without a confidence head"
        return self.block.confidence_logits.sigmoid()


@dataclass(frozen=True)
class VerifyPlan(VerifyRows):
    """The drafts to verify, and the flattened tokens.

    Attributes:
        width: bound on the rows of a request, anchor included.
    """

    width: int

    @classmethod
    def of(cls, rows: VerifyRows, width: int) -> VerifyPlan:
        """Return ``rows`` as a plan."""
        return cls(**vars(rows), width=width)


class TargetOutput(NamedTuple):
    """The output of the target's verification forward.

    Attributes:
        logits_output: SGLang's ``LogitsProcessorOutput``, whose ``next_token_logits`` are [N, V].
        captured: [N, taps * d] the tapped hidden states, which ``logits_output`` no longer holds.
        advance: called by the commit with the rows of each request that count, [bs] int64; None if no layer keeps
            anything of the rows but K/V.
    """

    logits_output: Any
    captured: torch.Tensor
    advance: Callable[[torch.Tensor], None] | None = None


@dataclass(frozen=True)
class StepOutcome:
    """The drafts of a step, their verification and acceptance; the next step may overwrite its tensors.

    Attributes:
        draft: proposals for all requests.
        plan: the tokens that were verified.
        target: their logits, if anything reads these after the step.
        accepted: what became of the drafts.
    """

    draft: DraftOutput
    plan: VerifyPlan
    target: TargetOutput
    accepted: AcceptResult


@dataclass(frozen=True)
class RequestLimits:
    """Bounds on the drafts verified per request, all of them fixed before the step's noise is drawn.

    Attributes:
        max_verify: [bs] the most drafts that may be verified.
        thresholds: [bs] a request's drafts are verified up to the first one whose raw confidence is below this; 0 for
            no such bound. None when no request has one. The confidence of a draft is known before the draft is drawn,
            and drafts are cut from the end of a block, so this decides about no draft by its own value or a later one.
    """

    max_verify: tuple[int, ...]
    thresholds: tuple[float, ...] | None = None
