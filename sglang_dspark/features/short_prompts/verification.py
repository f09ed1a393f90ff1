"""Lays prompts out as requests of a verification, which have a bounded number of rows."""

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
from sglang_dspark.step.decision import FORCED_RANK, ForcedRows
from sglang_dspark.step.packed import host_floats, host_index
from sglang_dspark.step.state import DecodeBatch, TargetOutput, VerifyPlan


@dataclass(frozen=True)
class Blocks:
    """The rows of prompts, cut into blocks: the first row of each is an anchor, later ones are its drafts.

    A layer stores the K/V of all rows before any of them attends, so the rows of a block see those of the blocks
    before, as the context that they continue.

    Attributes:
        owners: prompt of each block.
        contexts: tokens before each block.
        anchors: its first row among all rows.
        drafts: the width - 1 rows after the anchor of each block in turn; after its last one stands that one again.
        ranks: what these rank by: 1, or -1 where they do not count.
        lasts: last row of each prompt.
    """

    owners: list[int]
    contexts: list[int]
    anchors: list[int]
    drafts: list[int]
    ranks: list[float]
    lasts: list[int]

    @classmethod
    def of(cls, lengths: Sequence[int], contexts: Sequence[int], width: int) -> Blocks:
        """Cut prompts of these lengths, each of which goes on after so many tokens of ``contexts``.

        Args:
            width: the most rows of a block.
        """
        blocks, end = cls([], [], [], [], [], []), 0
        for prompt, (length, context) in enumerate(zip(lengths, contexts, strict=True)):
            for begin in range(0, length, width):
                anchor, drafts = end + begin, min(width, length - begin) - 1
                blocks.owners.append(prompt)
                blocks.contexts.append(context + begin)
                blocks.anchors.append(anchor)
                blocks.drafts.extend(anchor + min(column, drafts) for column in range(1, width))
                blocks.ranks.extend([1.0] * drafts + [-1.0] * (width - 1 - drafts))
            end += length
            blocks.lasts.append(end - 1)
        return blocks

    def __len__(self) -> int:
        return len(self.owners)

    @property
    def num_rows(self) -> int:
        """Return how many rows count."""
        return self.lasts[-1] + 1


_ALIGNED = 2  # int64 in the 16 bytes by which Triton tells addresses apart


@dataclass
class PromptRows(ForcedRows):
    """The rows of prompts, of which each block is a request.

    Attributes:
        runner: of the target.
        num_rows: of all prompts.
        lasts: [prompts] int64 last row of each.
        logits, states, positions: [prompts, V], [rows, taps * d] and [rows] int64: what the target has said after each
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
        # Not through requests: one that has ended while the prompts ran has no row any more.
        rows = batch.req_pool_indices.to(torch.int64)[owners]
        reqs = [batch.reqs[owner] for owner in blocks.owners]
        step = _step(worker.model_runner, ids[anchors], prefix_lens, rows, reqs, blocks.contexts)
        ranks = FORCED_RANK * host_floats(blocks.ranks, device).view(len(blocks), width - 1)
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
    """Return int64 of each part on ``device``, in one copy; each begins where kernels expect a tensor to."""
    numbers: list[int] = []
    begins = []
    for part in parts:
        begins.append(len(numbers))
        numbers += [*part, *[0] * (len(part) % _ALIGNED)]
    copied = host_index(numbers, device)
    return [copied[begin : begin + len(part)] for begin, part in zip(begins, parts, strict=True)]
