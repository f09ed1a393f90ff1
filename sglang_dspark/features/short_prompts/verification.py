"""Lay prompts out as requests of a verification."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import fmean
from typing import Any

import torch
from dspark_kernels import RoundKeys, SamplingBatch

from sglang_dspark.engine.batch import decode_batch
from sglang_dspark.engine.sglang_types import ModelRunner, Req, ScheduleBatch
from sglang_dspark.features.short_prompts.blocks import Blocks
from sglang_dspark.step.decision import FIRST, GivenRows
from sglang_dspark.step.packed import host_floats, host_index
from sglang_dspark.step.state import DecodeBatch, TargetOutput, VerifyPlan

_ALIGNED = 2  # int64 in the 16 bytes by which Triton tells addresses apart


@dataclass
class PromptRows(GivenRows):
    """The rows of prompts, of which each block is a request.

    Attributes:
        runner: of the target.
        num_rows: of all prompts.
        lasts: [prompts] int64 last row of each.
        logits, states, positions: [prompts, V], [rows, taps * d] and [rows] int64: what the target has said behind each
            prompt, the tapped states and the positions, in memory of their own.
        target: its output.
    """

    runner: ModelRunner
    num_rows: int
    lasts: torch.Tensor
    logits: torch.Tensor = field(init=False)
    states: torch.Tensor = field(init=False)
    positions: torch.Tensor = field(init=False)
    target: TargetOutput = field(init=False)

    @classmethod
    def of(cls, worker: Any, batch: ScheduleBatch, blocks: Blocks, width: int) -> PromptRows:
        """Lay out the prompts of SGLang's batch.

        Args:
            worker: ours.
            width: the most rows of a block.
        """
        device, ids = worker.device, batch.input_ids
        numbers = [blocks.contexts, blocks.owners, blocks.anchors, blocks.drafts, blocks.lasts]
        prefix_lens, owners, anchors, drafts, lasts = _copied(numbers, device)
        # Not by way of requests: one that has ended beside the prompts has no row any more.
        rows = batch.req_pool_indices.to(torch.int64)[owners]
        reqs = [batch.reqs[owner] for owner in blocks.owners]
        step = _step(worker.model_runner, ids[anchors], prefix_lens, rows, reqs, blocks.contexts)
        ranks = FIRST * host_floats(blocks.ranks, device).view(len(blocks), width - 1)
        num_drafts = blocks.num_rows - len(blocks)
        tokens = ids[drafts].view(ranks.shape)
        context = fmean(blocks.contexts)
        return cls(step, tokens, ranks, num_drafts, context, worker.model_runner, blocks.num_rows, lasts)

    def joined(self, step: DecodeBatch) -> DecodeBatch:
        running, ours = step.batch, self.step
        bounds = running.spec_info.nxt_kv_lens_cpu if running.seq_lens_cpu is None else running.seq_lens_cpu
        return _step(
            self.runner,
            torch.cat([step.anchors, ours.anchors]),
            torch.cat([step.prefix_lens, ours.prefix_lens]),
            torch.cat([step.req_pool_indices, ours.req_pool_indices]),
            [*running.reqs, *ours.batch.reqs],
            [*bounds.tolist(), *ours.batch.seq_lens_cpu.tolist()],
        )

    def read(self, plan: VerifyPlan, target: TargetOutput, before: int) -> None:
        rows = plan.indptr[before] + torch.arange(self.num_rows, device=self.lasts.device)
        self.logits = target.logits_output.next_token_logits[rows[self.lasts]]
        self.states, self.positions, self.target = target.captured[rows], plan.positions[rows], target


def _step(
    runner: ModelRunner,
    anchors: torch.Tensor,
    prefix_lens: torch.Tensor,
    rows: torch.Tensor,
    reqs: Sequence[Req],
    lens: Sequence[int],
) -> DecodeBatch:
    """Return a step of which nothing is drawn.

    Args:
        anchors, prefix_lens, rows: [n] int64 as in :class:`DecodeBatch`.
        reqs, lens: of its requests, and lengths that the host knows.
    """
    return DecodeBatch(
        anchors=anchors,
        prefix_lens=prefix_lens,
        req_pool_indices=rows,
        req_to_token=runner.req_to_token_pool.req_to_token,
        rows=_greedy(len(rows), anchors.device),
        keys=RoundKeys(0, 0, rows, prefix_lens),
        keeps_logits=True,
        batch=decode_batch(runner, reqs, rows, prefix_lens, lens),
    )


@lru_cache
def _greedy(requests: int, device: torch.device) -> SamplingBatch:
    return SamplingBatch.by_temperature(requests, None, device)


def _copied(parts: Sequence[Sequence[int]], device: torch.device) -> list[torch.Tensor]:
    """Return int64 of each part on ``device``, by one copy; each begins where kernels expect a tensor to."""
    numbers: list[int] = []
    begins = []
    for part in parts:
        begins.append(len(numbers))
        numbers += [*part, *[0] * (len(part) % _ALIGNED)]
    copied = host_index(numbers, device)
    return [copied[begin : begin + len(part)] for begin, part in zip(begins, parts, strict=True)]
