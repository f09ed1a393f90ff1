"""Verify short prompts in a scheduler.

A prefill is launched kernel by kernel, and requests that run wait for it. A verification of few rows is one CUDA graph,
and a prompt is a text all of whose drafts are known and accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from dspark_kernels import DraftBlock, RoundKeys, SamplingBatch
from sglang.srt.managers.utils import GenerationBatchResult

from sglang_dspark.draft.families import family_of
from sglang_dspark.engine.feature import Counted, Encoded, Part
from sglang_dspark.engine.scheduler.batch import decode_batch, prompts_of
from sglang_dspark.engine.sglang_types import ScheduleBatch
from sglang_dspark.features.short_prompts.blocks import Blocks
from sglang_dspark.scheduling.sps_table import SpsTable
from sglang_dspark.step.confidence import Confidence
from sglang_dspark.step.decision import StepDecision
from sglang_dspark.step.selection import TopK
from sglang_dspark.step.state import DecodeBatch, DraftOutput
from sglang_dspark.step.transfers import host_floats, host_index

# By how much a prefill of few rows takes longer than a captured verification of one: guessed from an 8B target on an
# H200, where they took 5 to 9 ms, and 5. And how many rows take hardly longer than one, where times are not known.
_PREFILL, _UNTIMED_ROWS = 1.5, 128

_ALIGNED = 2  # int64 in the 16 bytes by which Triton tells addresses apart
VERIFIED, PREFILLED = "verification", "prefill"


class ShortPrompts(Part):
    """Have the target read short prompts in verifications.

    Args:
        worker: ours.
    """

    def __init__(self, worker: Any) -> None:
        self._worker, self._width = worker, worker.max_verify + 1
        self._asked: int | None = worker.options.prompt_rows
        self._most_rows = 0  # until there are graphs
        self._prompts = {VERIFIED: 0, PREFILLED: 0}
        self._greedy = cache(lambda blocks: SamplingBatch.by_temperature(blocks, None, worker.device))

    @classmethod
    def of(cls, worker: Any) -> ShortPrompts | None:
        """Return the part of a worker; None if the target needs SGLang's prefills.

        Recurrent layers go through a prompt once, and only accepted rows advance them. SGLang finds the experts of
        prompts in its own forwards.
        """
        runner = worker.model_runner
        recurrent = family_of(runner.model_config.hf_config.architectures).recurrent
        return None if recurrent or worker.server_args.enable_return_routed_experts else cls(worker)

    def ready(self) -> None:
        """Decide how many rows are verified at most."""
        captured, times = self._worker.executors.captured, self._worker.schedule.times
        if captured is not None and not captured.tiers.tokens:
            self._width = 1  # without a drafter, only plain steps are captured
        if self._asked is not None:
            self._most_rows = self._asked
        elif captured is not None:
            table = None if times is None else times.table
            self._most_rows = most_rows(captured.tiers.timed, table, self._width)

    def encode(self, batch: ScheduleBatch) -> Encoded | None:
        blocks = self._blocks(batch)
        self._prompts[PREFILLED if blocks is None else VERIFIED] += len(prompts_of(batch))
        return None if blocks is None else self._verify(batch, blocks)

    def _blocks(self, batch: ScheduleBatch) -> Blocks | None:
        """Return how the prompts of a batch are verified; None if SGLang encodes them."""
        if batch.extend_num_tokens > self._most_rows or _needs_prefill(batch):
            return None
        blocks = Blocks.of(batch.extend_lens, batch.prefix_lens, self._width)
        return blocks if self._has_room(blocks) else None

    def _has_room(self, blocks: Blocks) -> bool:
        """Return whether a graph has room; without graphs, whether the operator has asked and SGLang has room."""
        captured = self._worker.executors.captured
        if captured is None:
            return self._asked is not None and len(blocks) <= self._worker.model_runner.max_running_requests
        tiers = captured.tiers
        most = tiers.tokens[-1] if tiers.tokens else tiers.requests[-1]
        return len(blocks) <= tiers.requests[-1] and blocks.num_rows <= most

    def _verify(self, batch: ScheduleBatch, blocks: Blocks) -> Encoded:
        runner, device, num, width = self._worker.model_runner, self._worker.device, len(blocks), self._width
        numbers = [blocks.contexts, blocks.owners, blocks.anchors, blocks.drafts, blocks.lasts]
        prefix_lens, owners, anchors, drafts, lasts = _copied(numbers, device)
        # Not by way of requests: one that has ended beside the prompts has no row any more.
        rows = batch.req_pool_indices.to(torch.int64)[owners]
        reqs = [batch.reqs[owner] for owner in blocks.owners]
        ids, depth = batch.input_ids, width - 1
        step = DecodeBatch(
            anchors=ids[anchors],
            prefix_lens=prefix_lens,
            req_pool_indices=rows,
            req_to_token=runner.req_to_token_pool.req_to_token,
            rows=self._greedy(num),
            keys=RoundKeys(0, 0, rows, prefix_lens),  # nothing is drawn
            keeps_logits=True,
            batch=decode_batch(runner, reqs, rows, prefix_lens, blocks.contexts),
        )
        ranks = host_floats(blocks.ranks, device).view(num, depth)
        draft = DraftOutput(DraftBlock(ids[drafts].view(num, depth)), Confidence(None, ranks), [depth] * num)
        decision = StepDecision(depth, TopK(blocks.num_rows - num))
        plan, target, in_graphs = self._worker.verify(step, draft, decision)
        # Captured logits and states are overwritten by the next replay: the first are copied here, the others read
        # before it.
        output = replace(
            target.logits_output,
            next_token_logits=target.logits_output.next_token_logits[lasts],
            hidden_states=target.captured[: blocks.num_rows],
        )
        result = GenerationBatchResult(logits_output=output, can_run_cuda_graph=in_graphs)
        return Encoded(result, ids, plan.positions[: blocks.num_rows])

    def counted(self) -> Sequence[Counted]:
        return (Counted("prompts", "Prompts and chunks, by how the target has read them.", "path", self._prompts),)


def _copied(parts: Sequence[Sequence[int]], device: torch.device) -> list[torch.Tensor]:
    """Return int64 of each part on ``device``, by one copy; each begins where kernels expect a tensor to."""
    numbers: list[int] = []
    begins = []
    for part in parts:
        begins.append(len(numbers))
        numbers += [*part, *[0] * (len(part) % _ALIGNED)]
    copied = host_index(numbers, device)
    return [copied[begin : begin + len(part)] for begin, part in zip(begins, parts, strict=True)]


def _needs_prefill(batch: ScheduleBatch) -> bool:
    """Return whether SGLang's batch asks for what only its own prefills do.

    They compute log-probabilities, hidden states and scores of prompts, take embeddings in place of tokens, such as
    those of pictures, and wait layer by layer for prefixes that come back from host memory: a graph waits for nothing.
    """
    return bool(
        batch.return_logprob
        or batch.return_hidden_states
        or batch.is_prefill_only
        or batch.input_embeds is not None
        or any(batch.multimodal_inputs or ())
        or batch.hicache_consumer_index >= 0
    )


def most_rows(tiers: Sequence[int], table: SpsTable | None, width: int) -> int:
    """Return the rows up to which a verification takes no longer than a prefill.

    Args:
        tiers: rows of captured verifications, ascending.
        table: of step times; None if they were not measured.
        width: the most rows of a request.
    """
    if table is None:
        return _UNTIMED_ROWS
    prefill_ms = _PREFILL * table.step_ms(1, 1, 0, 0.0)
    return max((rows for rows in tiers if table.step_ms(-(-rows // width), rows, 0, 0.0) <= prefill_ms), default=0)
