"""Buffers at fixed addresses for captured steps, and the shapes of these."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import torch
from dspark_kernels import (
    DraftBlock,
    PlanNumbers,
    PreparedStep,
    RoundKeys,
    SamplingBatch,
    StepRequests,
    VerifyRows,
    prepare,
)

from sglang_dspark.scheduling.forecast import split_coefficients
from sglang_dspark.step.packed import host_floats
from sglang_dspark.step.state import Confidence, DecodeBatch, VerifyPlan
from sglang_dspark.worker.eager import EagerExecutor

# A verification of more tokens keeps a GPU busy for so long that launching it kernel by kernel costs nothing.
MAX_TOKENS = 1024
# Every captured draft of sampled requests keeps its scores, [slots, gamma, V] float32: 270 MB for the tiers up to here
# with 152k tokens and gamma 7.
MAX_SAMPLED = 32


@dataclass(frozen=True)
class Tiers:
    """Captured sizes, ascending; a step runs in the smallest that has room for it.

    Attributes:
        requests: request slots of a draft of greedy requests, and of a non-speculative step.
        sampled: request slots of a draft with sampled requests: powers of two.
        tokens: rows of a verification forward.
    """

    requests: tuple[int, ...]
    sampled: tuple[int, ...]
    tokens: tuple[int, ...]

    @classmethod
    def of(cls, requests: Sequence[int], max_verify: int) -> Tiers:
        """Return tiers for up to ``max(requests)`` requests that verify up to ``max_verify`` drafts each.

        Args:
            requests: sizes that SGLang would capture.
        """
        most = min(max(requests) * (max_verify + 1), MAX_TOKENS)
        tokens, size = [], 2
        while size < most:
            tokens.append(size)
            # Every size up to 16, then eight to a power of two: at most an eighth of a tier is padding.
            size += 1 << max(0, size.bit_length() - 4)
        slots = tuple(sorted(requests))
        sampled = tuple(size for size in slots if size <= MAX_SAMPLED and size & (size - 1) == 0)
        return cls(slots, sampled, (*tokens, most) if max_verify else ())

    @property
    def timed(self) -> tuple[int, ...]:
        """Return rows whose time is known. A non-speculative step of one request has a row fewer than others."""
        return (1, *self.tokens) if self.tokens else ()

    @property
    def digest(self) -> str:
        """Return a short name: tables that were measured with other tiers do not fit."""
        rows = max(self.tokens, default=0)
        return f"{len(self.requests)} sizes to {self.requests[-1]} requests, {len(self.tokens)} to {rows} rows"


def at_least(sizes: Sequence[int], wanted: int) -> int | None:
    """Return the smallest of ``sizes``, which ascend, that has room for ``wanted``; None if there is none."""
    index = bisect_left(sizes, wanted)
    return sizes[index] if index < len(sizes) else None


T = TypeVar("T", PreparedStep, VerifyRows)


class StepBuffers:
    """Buffers of all tiers, each of which has the first part of them.

    What is not the step's is padding: request slots without context whose results are not read, rows of no request.

    Args:
        req_to_token: the engine's, [rows, columns] int32.
        tiers: sizes that are captured.
        depth: drafts per request that they have room for.
        seed: of the engine's noise.

    Attributes:
        prepared: the staged step.
        coefficients: of the calibration of confidences.
        weights: of candidates.
        request_weights: [slots] float32 that drafts rank by, in addition to their survivals.
        drafts: [slots, depth] int64.
        confidence: returns the confidences of so many requests; the next draft overwrites them.
        rows: of the plan.
    """

    def __init__(self, eager: EagerExecutor, req_to_token: torch.Tensor, tiers: Tiers, depth: int, seed: int) -> None:
        self._drafter, self._forecast = eager.drafter, eager.schedule.forecast
        self._req_to_token, self._seed = req_to_token, seed
        slots, device = tiers.requests[-1], req_to_token.device
        self.prepared = _zeroed(PreparedStep.empty(slots, self._drafter.num_slots, device))
        self._step_number = torch.zeros((), dtype=torch.int64, device=device)
        self._temperatures = torch.zeros(slots, device=device)
        self._copied = self._forecast.packed_coefficients
        self._learned = self._copied.clone()
        self.coefficients, self.weights = split_coefficients(self._learned)
        self.request_weights = torch.ones(slots, device=device)
        self._weighted = False  # whether those of the last step differed
        self.drafts = torch.zeros((slots, depth), dtype=torch.int64, device=device)
        candidates = eager.drafter.candidates
        self._rules = None if candidates is None else candidates.buffers(slots)
        scores = torch.zeros((2, slots, depth), device=device)
        self._scores = Confidence(None if self._forecast.calibration is None else scores[0], scores[1])
        self.confidence = cache(self._scores.first)
        self.rows = _zeroed(VerifyRows.empty(slots, max((slots, *tiers.tokens)), device))

    def stage(self, step: DecodeBatch, numbers: PlanNumbers | None) -> None:
        """Copy a step, and what a captured plan does with its drafts; None if that plan is not read."""
        drafter = self._drafter
        prepare(step.requests, drafter.num_slots, drafter.mask_token_id, self.prepared, numbers or PlanNumbers())
        if self._rules is not None:
            self._rules.stage(step)

    def stage_weights(self, weights: Sequence[float] | None) -> None:
        """Copy what drafts of each request count; None if all count alike."""
        if weights is not None:
            self.request_weights[: len(weights)] = host_floats(weights, self.request_weights.device)
        elif self._weighted:
            self.request_weights.fill_(1)
        self._weighted = weights is not None

    def stage_noise(self, step: DecodeBatch, slots: int) -> None:
        """Copy what a captured draft of sampled requests is drawn with."""
        requests = len(step)
        self._temperatures[:requests] = step.rows.draw_temperatures
        self._temperatures[requests:slots] = 0
        self._step_number.fill_(step.keys.step)

    def stage_learned(self) -> None:
        """Copy what was learned from outcomes since the last call."""
        if self._copied is not self._forecast.packed_coefficients:
            self._copied = self._forecast.packed_coefficients
            self._learned.copy_(self._copied)

    def keep(self, block: DraftBlock, confidence: Confidence | None) -> None:
        """Copy a draft of the first requests."""
        bs = len(block.tokens)
        self.drafts[:bs] = block.tokens
        if confidence is not None:
            for kept, new in zip(vars(self._scores).values(), vars(confidence).values(), strict=True):
                if new is not None:
                    kept[:bs] = new

    def requests(self, slots: int) -> StepRequests:
        """Return the staged requests, padded to ``slots``."""
        return self.prepared.requests(self._req_to_token, slots)

    def step(self, slots: int, *, sampled: bool) -> DecodeBatch:
        """Return the staged step, padded to ``slots``; without ``sampled``, all of its requests are greedy."""
        requests = self.requests(slots)
        temperatures = self._temperatures[:slots] if sampled else None
        return DecodeBatch(
            anchors=requests.anchors,
            prefix_lens=requests.prefix_lens,
            req_pool_indices=requests.req_pool_indices,
            req_to_token=requests.req_to_token,
            rules=None if self._rules is None else self._rules.first(slots),
            rows=SamplingBatch.by_temperature(slots, temperatures, self._req_to_token.device),
            # The kernels key their noise by slot; positions matter to seeded requests only.
            keys=RoundKeys(self._seed, self._step_number, requests.req_pool_indices, requests.prefix_lens),
        )

    def plan(self, slots: int, rows: int, width: int) -> VerifyPlan:
        """Return the plan of ``rows`` rows, of at most ``width`` for each of ``slots`` requests."""
        whole = self.rows
        return VerifyPlan(
            verify_lens=whole.verify_lens[:slots],
            indptr=whole.indptr[: slots + 1],
            requests=whole.requests[:rows],
            columns=whole.columns[:rows],
            input_ids=whole.input_ids[:rows],
            positions=whole.positions[:rows],
            slots=whole.slots[:rows],
            width=width,
        )


def _zeroed(buffers: T) -> T:
    """Return the inputs of a capture's warm-up: no context, no rows, token 0."""
    for tensor in vars(buffers).values():
        tensor.zero_()
    return buffers
