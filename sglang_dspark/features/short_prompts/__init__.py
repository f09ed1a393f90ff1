"""Short prompts: their tokens are verified like drafts, with the CUDA graphs of decode steps, in place of a prefill.

A prefill is launched kernel by kernel, and requests that run wait for it. A verification of few rows is one CUDA graph,
and a prompt is a text all of whose drafts are known and accepted.

SGLang sees a prefill, during which other requests wait. So it merges the prompts into the running batch after the step,
as after every prefill, and finds all requests where it looks for them when one is aborted, or all are retracted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.managers.overlap_utils import resolve_forward_inputs
from sglang.srt.managers.schedule_batch import NextBatchPlan
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.plugins.hook_registry import HookType

from sglang_dspark.draft.families import family_of
from sglang_dspark.engine.batch import DECODED_WITH_PREFILL, DSparkBatchResult, prompts_of
from sglang_dspark.engine.feature import Feature
from sglang_dspark.engine.hooks import Moment, hook
from sglang_dspark.engine.part import Counted, Encoded, Encoder
from sglang_dspark.engine.server import DSparkServer, attached
from sglang_dspark.engine.sglang_types import ScheduleBatch, ServerArgs
from sglang_dspark.errors import nothing
from sglang_dspark.features.short_prompts.verification import Blocks, PromptRows
from sglang_dspark.gpu_paths import is_on
from sglang_dspark.scheduling.policies import verified_sooner
from sglang_dspark.scheduling.sps_table import SpsTable

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

    from sglang_dspark.engine.worker_base import Publish


PART = "dspark_short_prompts"
"""Attribute of SGLang's ``ReqToTokenPool`` by which batches find the part of their scheduler."""


@dataclass
class RunningWithPrefill:
    """The requests that run with the prompts of a batch in one step.

    Attributes:
        batch: SGLang's, prepared for a decode step.
        blocks: how the prompts are laid out.
        scheduler: SGLang's, once the batch of prompts is the next one.
        drafted: whether the step has drafts, once it has run.
    """

    batch: Any
    blocks: Blocks
    scheduler: Scheduler = field(init=False)
    drafted: bool = field(init=False, default=False)

    def __len__(self) -> int:
        return len(self.batch.reqs)

    def decode(
        self, prompts: ScheduleBatch, step: Callable[[ScheduleBatch, Publish], DSparkBatchResult]
    ) -> PrefillAndDecodeResult:
        """Do around the step what SGLang's ``run_batch`` does around one that only decodes.

        Returns:
            A result for prompts, without any of their own yet.
        """
        scheduler, batch = self.scheduler, self.batch
        rows, future_map, overlap = batch.req_pool_indices, scheduler.future_map, scheduler.enable_overlap
        if overlap:
            future_map.resolve_seq_lens_cpu(batch)
        resolve_forward_inputs(batch, future_map)
        kept = list(vars(batch).values())
        # Without overlap the next step gets the lengths from the batch.
        with scheduler._forward_isolation(batch, overlap=False):
            result = step(batch, partial(future_map.publish, rows) if overlap else nothing)
        batch.spec_info = result.next_draft_input
        self.drafted = result.record is not None and result.record.decision.draft_len > 0
        if overlap:
            scheduler._relay_forward_payload(batch, rows, result)
            batch.spec_info.future_indices = rows
        else:
            batch.seq_lens = result.new_seq_lens
            if batch.seq_lens_cpu is not None:
                batch.seq_lens_cpu = result.new_seq_lens.cpu()
        for name in ("forward_iter", "launch_ts", "after_idle_gap"):  # from which SGLang times steps
            setattr(batch, name, getattr(prompts, name))
        return PrefillAndDecodeResult(
            running=(batch.copy(), result), extra_keep_alive_refs=kept, can_run_cuda_graph=result.can_run_cuda_graph
        )


@dataclass(kw_only=True)
class PrefillAndDecodeResult(GenerationBatchResult):
    """The result of prompts, and that of the requests that ran in the same step, with their batch."""

    running: tuple[Any, DSparkBatchResult]

    @property
    def additional_batches(self) -> Sequence[Any]:
        """Return the batches whose requests get tokens from this result, in addition to that of the prompts."""
        return [self.running[0]]

    def copy_to_cpu(self, *args: object, **kwargs: object) -> None:
        """Start the copies of both; the last one records the event that readers of the prompts wait for."""
        batch, result = self.running
        result.copy_done = torch.get_device_module(self.next_token_ids.device).Event()
        result.copy_to_cpu(return_logprob=batch.return_logprob, return_hidden_states=batch.return_hidden_states)
        super().copy_to_cpu(*args, **kwargs)


def running_with(prompts: ScheduleBatch) -> RunningWithPrefill | None:
    """Return what is verified together with the prompts of SGLang's batch."""
    return vars(prompts).get(DECODED_WITH_PREFILL)


@hook(
    "sglang.srt.managers.schedule_batch.ScheduleBatch.mix_with_running",
    HookType.AROUND,
    where="scheduler",
    reason="in the step of a prompt SGLang gives running requests one token; their drafts fit into its verification",
    by=Moment.SOME_TIME,  # with mixed chunks
)
def decode_with_prefill(original: Callable[..., None], prompts: ScheduleBatch, running: ScheduleBatch) -> None:
    """Note requests that draft in the step of prompts, or have SGLang give each one token."""
    part = getattr(prompts.req_to_token_pool, PART, None)
    blocks = None if part is None else part.blocks_with(prompts, running)
    if blocks is None:
        original(prompts, running)
    else:
        vars(prompts)[DECODED_WITH_PREFILL] = RunningWithPrefill(running, blocks)


@hook(
    "sglang.srt.managers.scheduler.Scheduler.get_new_batch_prefill",
    HookType.AFTER,
    where="scheduler",
    reason="running requests that are verified together with prompts stay a batch of their own",
    by=Moment.SOME_TIME,
)
def keep_apart(plan: NextBatchPlan, scheduler: Scheduler, running_batch: object) -> None:
    """Have requests that are to run with the next batch of prompts stay the running ones."""
    prompts = plan.batch_to_run
    found = None if prompts is None else running_with(prompts)
    if found is None:
        return
    found.scheduler, prompts.decoding_reqs = scheduler, None
    found.batch.batch_is_full, plan.running_batch = plan.running_batch.batch_is_full, found.batch


@hook(
    "sglang.srt.managers.scheduler.Scheduler.process_batch_result",
    HookType.AFTER,
    where="scheduler",
    reason="a step with prompts has a result of its own after theirs",
)
def process_running(processed: None, scheduler: Scheduler, batch: object, result: object) -> None:
    """Process what became of the requests that ran with prompts."""
    if isinstance(result, PrefillAndDecodeResult):
        running, outcome = result.running
        scheduler.process_batch_result(running, outcome)
        getattr(running.req_to_token_pool, PART).count(outcome)


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
            self._width = 1  # without a drafter, only non-speculative steps are captured
        self._table = None if times is None else times.table
        if self._asked is not None:
            self._most_rows = self._asked
        elif captured is not None:
            self._most_rows = (captured.tiers.tokens or captured.tiers.requests)[-1]

    def blocks_with(self, batch: ScheduleBatch, running: ScheduleBatch) -> Blocks | None:
        """Return how prompts are verified together with a step of ``running``; None if they are not.

        Grammars and pictures of running requests have SGLang prepare a step in other ways. Without a drafter there may
        be nothing to draft.
        """
        if not self._worker.drafter.num_drawn or running.has_grammar or any(running.multimodal_inputs or ()):
            return None
        return self._blocks(batch, len(running.reqs))

    def encode(self, batch: ScheduleBatch) -> Encoded | None:
        running = running_with(batch)
        blocks = self._blocks(batch) if running is None else running.blocks
        path = PREFILLED if blocks is None else VERIFIED if running is None else BESIDE
        self._prompts[path] += len(prompts_of(batch))
        if blocks is None:
            return None
        rows = PromptRows.of(self._worker, batch, blocks, self._width)
        if running is None:
            result = GenerationBatchResult(can_run_cuda_graph=self._worker.verify(rows))
        else:
            result = running.decode(batch, partial(self._worker.decode, extra=rows))
            self._worker.schedule.invalidate()  # the time of such a step says nothing about others
        output = rows.target.logits_output
        result.logits_output = replace(output, next_token_logits=rows.logits, hidden_states=rows.states)
        return Encoded(result, batch.input_ids, rows.positions)

    def _blocks(self, batch: ScheduleBatch, running: int = 0) -> Blocks | None:
        """Return how the prompts of a batch are verified together with so many requests; None if they are not."""
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
        """Count the drafts of a step that ran with prompts; its result has been read."""
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


def verifies_prompts(args: ServerArgs) -> bool:
    """Return whether the operator asks for it. On a CPU it is slower, and no GPU has run it."""
    server = attached(args)
    if not isinstance(server, DSparkServer):
        return False
    if (rows := server.config.prompt_rows) is not None:
        return rows > 0
    return args.device != "cpu" and is_on("prompt-rows", server.config.unproven, on_gpu=True)


FEATURE = Feature(
    __name__,
    is_used=verifies_prompts,
    part=ShortPrompts.of,
)
