"""Verify short prompts in a scheduler.

A prefill is launched kernel by kernel, and requests that run wait for it. A verification of few rows is one CUDA graph,
and a prompt is a text all of whose drafts are known and accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

from sglang.srt.managers.utils import GenerationBatchResult

from sglang_dspark.draft.families import family_of
from sglang_dspark.engine.batch import DSparkBatchResult, prompts_of
from sglang_dspark.engine.part import Counted, Encoded, Encoder
from sglang_dspark.engine.sglang_types import ScheduleBatch
from sglang_dspark.features.short_prompts.blocks import Blocks
from sglang_dspark.features.short_prompts.riding import PART, beside
from sglang_dspark.features.short_prompts.verification import PromptRows
from sglang_dspark.scheduling.policies import verified_sooner
from sglang_dspark.scheduling.sps_table import SpsTable

VERIFIED, PREFILLED, BESIDE = "verification", "prefill", "beside"


class ShortPrompts(Encoder):
    """Have the target read short prompts in verifications.

    Args:
        worker: ours.
    """

    def __init__(self, worker: Any) -> None:
        self._worker, self._width = worker, worker.max_verify + 1
        self._asked: int | None = worker.options.prompt_rows
        self._most_rows = 0  # until there are graphs
        self._table: SpsTable | None = None
        self._prompts = dict.fromkeys((VERIFIED, PREFILLED, BESIDE), 0)
        self._drafts = dict.fromkeys(("verified", "accepted"), 0)

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
        setattr(self._worker.model_runner.req_to_token_pool, PART, self)
        captured, times = self._worker.executors.captured, self._worker.schedule.times
        if captured is not None and not captured.tiers.tokens:
            self._width = 1  # without a drafter, only plain steps are captured
        self._table = None if times is None else times.table
        if self._asked is not None:
            self._most_rows = self._asked
        elif captured is not None:
            self._most_rows = (captured.tiers.tokens or captured.tiers.requests)[-1]

    def blocks_beside(self, batch: ScheduleBatch, running: ScheduleBatch) -> Blocks | None:
        """Return how prompts are verified beside a step of ``running``; None if they are not.

        Grammars and pictures of running requests have SGLang prepare a step in other ways. Without a drafter there may
        be nothing to draft.
        """
        if not self._worker.drafter.num_drawn or running.has_grammar or any(running.multimodal_inputs or ()):
            return None
        return self._blocks(batch, len(running.reqs))

    def encode(self, batch: ScheduleBatch) -> Encoded | None:
        running = beside(batch)
        blocks = self._blocks(batch) if running is None else running.blocks
        path = PREFILLED if blocks is None else VERIFIED if running is None else BESIDE
        self._prompts[path] += len(prompts_of(batch))
        if blocks is None:
            return None
        rows = PromptRows.of(self._worker, batch, blocks, self._width)
        if running is None:
            result = GenerationBatchResult(can_run_cuda_graph=self._worker.verify(rows))
        else:
            result = running.decode(batch, partial(self._worker.decode, beside=rows))
            self._worker.schedule.invalidate()  # the time of such a step says nothing about others
        output = rows.target.logits_output
        result.logits_output = replace(output, next_token_logits=rows.logits, hidden_states=rows.states)
        return Encoded(result, batch.input_ids, rows.positions)

    def _blocks(self, batch: ScheduleBatch, running: int = 0) -> Blocks | None:
        """Return how the prompts of a batch are verified beside so many requests; None if they are not."""
        if batch.extend_num_tokens > self._most_rows or _needs_prefill(batch):
            return None
        blocks = Blocks.of(batch.extend_lens, batch.prefix_lens, self._width)
        if not self._has_room(len(blocks) + running, blocks.num_rows + running * self._width):
            return None
        context = fmean(blocks.contexts)
        pays = self._asked is not None or verified_sooner(self._table, len(blocks), blocks.num_rows, context)
        return blocks if pays else None

    def _has_room(self, requests: int, rows: int) -> bool:
        """Return whether a graph has room; without graphs, whether the operator has asked and SGLang has room."""
        captured = self._worker.executors.captured
        if captured is None:
            return self._asked is not None and requests <= self._worker.model_runner.max_running_requests
        tiers = captured.tiers
        return requests <= tiers.requests[-1] and rows <= (tiers.tokens or tiers.requests)[-1]

    def count(self, result: DSparkBatchResult) -> None:
        """Count the drafts of a step that ran beside prompts; its result has been read."""
        verified, committed = result.cap_lens, result.accept_lens
        assert verified is not None, "read_copy fills them"
        assert committed is not None, "read_copy fills them"
        # Each request has an anchor among its rows, and a token of the target's among those that it gets.
        self._drafts["verified"] += int((verified - 1).sum())
        self._drafts["accepted"] += int((committed - 1).sum())

    def counted(self) -> Sequence[Counted]:
        return (
            Counted("prompts", self._prompts),
            Counted("drafts_beside_prompts", self._drafts),
        )


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
