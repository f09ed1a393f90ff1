"""Serve SGLang's scheduler: construction, memory, and the dispatch of batches to prefill and decode."""

from __future__ import annotations

import logging
from abc import abstractmethod
from array import array
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import torch
from dspark_kernels import DraftBlock, SimulatedDraws, Windows, accept
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.mem_cache.memory_pool import KVCache
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker

from sglang_dspark.engine.agreement import Agreement
from sglang_dspark.engine.answers import Ends, Logprobs
from sglang_dspark.engine.batch import DSparkBatchResult, SamplingReader, round_keys
from sglang_dspark.engine.draft_input import DSparkDraftInput, forget_step
from sglang_dspark.engine.hooks import Moment, check_called
from sglang_dspark.engine.logits_processing import Adjustments, NanCheck
from sglang_dspark.engine.part import (
    CandidateSource,
    DrawnTokens,
    Encoded,
    Encoder,
    LogitsPart,
    Part,
    part_of,
    parts_of,
)
from sglang_dspark.engine.scheduler import check_start, failure_report
from sglang_dspark.engine.server import attached_to_ours
from sglang_dspark.engine.sglang_types import (
    GenerationBatchResult,
    ModelRunner,
    Req,
    ScheduleBatch,
    ServerArgs,
    TpModelWorker,
)
from sglang_dspark.engine.step_control import StepControl
from sglang_dspark.engine.target import capturing_forward, kv_region
from sglang_dspark.engine.verify import as_without_dspark, verify_with_prompts
from sglang_dspark.errors import nothing
from sglang_dspark.scheduling.schedule import Schedule
from sglang_dspark.scheduling.simulated_acceptance import acceptance_probabilities
from sglang_dspark.step.packed import host_index

logger = logging.getLogger(__name__)


class SpecWorkerAdapter(BaseSpecWorker):
    """``BaseSpecWorker`` of an algorithm whose drafter SGLang does not know.

    It has no graphs or weights that SGLang's features for draft models (weight updates, sizes in the log) could work
    with. Its K/V it shows where prefixes move to host memory.
    """

    draft_pool: KVCache | None = None  # see ``Worker`` in part.py
    _draft_worker = None  # the base class takes it for a drafter without a model

    def __init__(self, target_worker: TpModelWorker) -> None:
        self._target_worker = target_worker
        super().__init__()

    def __getattr__(self, name: str) -> Any:
        # The scheduler treats its model worker like the target's: anything not ours is the target's.
        if name == "_target_worker":
            raise AttributeError(name)
        return getattr(self._target_worker, name)

    def _draft_model_runners(self) -> tuple[SimpleNamespace, ...]:
        # The base class plans from their K/V pools what moves to host memory next to the target's.
        return () if self.draft_pool is None else (SimpleNamespace(token_to_kv_pool=self.draft_pool),)


Publish = Callable[[torch.Tensor], None]


class SpecWorkerBase(SpecWorkerAdapter):
    """Implement SGLang's Spec V2 worker interface; what is left to the subclass is abstract below.

    Attributes:
        drafter: with a network or without; made with the worker.
        schedule: made with the worker.
        control: of its steps; made when it is prepared to serve.
    """

    drafter: Any
    schedule: Schedule
    control: StepControl

    def __init__(self, *, server_args: ServerArgs, target_worker: TpModelWorker, **_given: object) -> None:
        super().__init__(target_worker)
        self.server_args = resolving_view(server_args)
        ranks = get_parallel().tp_group
        self.agreement = Agreement(ranks)
        if not self.agreement.leads:
            # The ranks of a server have the same to say.
            logging.getLogger("sglang_dspark").setLevel(logging.WARNING)
        self.device = torch.device(target_worker.device)
        self.settled = attached_to_ours(server_args)
        self.options = self.settled.config
        self.sampling = SamplingReader(self.device)
        self.drafted_sampling = SamplingReader(self.device)  # of the requests that are drafted, where these are not all
        # Drafts that a step may verify per request: K/V slots are reserved for these and the anchor.
        self.max_verify: int = self.server_args.speculative_num_draft_tokens - 1
        check = NanCheck.of(self)
        adjustments = Adjustments(int(target_worker.model_runner.model_config.vocab_size), self.device)
        self.logits_parts: tuple[LogitsPart, ...] = (adjustments,) if check is None else (check, adjustments)
        self.parts = (*self.logits_parts, Logprobs(), Ends(), *parts_of(self, server_args))
        self.encoder = part_of(self.parts, Encoder)
        self.candidates = part_of(self.parts, CandidateSource)
        self.step = 0

    @abstractmethod
    def decode(self, batch: ScheduleBatch, publish: Publish) -> DSparkBatchResult:
        """Run one speculative step; call ``publish(new_seq_lens)`` once the lengths are known on the device."""

    @abstractmethod
    def prepare_to_serve(self) -> None:
        """Capture, measure and warm up what a step needs; no request has arrived yet."""

    def alloc_memory_pool(self, **pools: Any) -> None:
        """Make the draft K/V; the target's pool exists."""
        allocator, runner = pools["token_to_kv_pool_allocator"], self._target_worker.model_runner
        with kv_region(runner):
            cache = self.drafter.allocate(allocator.size_full + allocator.page_size, runner.dtype)
        for part in self.parts:
            part.pools_made(allocator, cache)

    def init_attention_backends(self) -> None:
        """Put our attention of verification next to the target's backend, before any graph is captured."""
        verify_with_prompts(self._target_worker.model_runner)
        for part in self.parts:
            part.attention_made()

    def init_cuda_graphs(self) -> None:
        """Prepare to serve; SGLang calls this last, after the target's graphs were captured."""
        runner = self._target_worker.model_runner
        check_start(runner, self.max_verify + 1, captures=self.settled.drafter is not None)
        self.prepare_to_serve()
        check_called(Moment.READY)

    def clear_cache_pool(self) -> None:
        """Tell the features; a draft K/V row is valid exactly as long as the target's row with the same slot."""
        if self.candidates is not None:
            self.candidates.flushed()

    def observe(self, result: GenerationBatchResult, batch: ScheduleBatch) -> None:
        """Learn from a decode result whose tensors have reached the host.

        Raises:
            EngineError: SGLang has not called a hook that every answered request needs.
        """
        check_called(Moment.ANSWERED)
        if isinstance(result, DSparkBatchResult) and result.record is not None:
            forget_step(batch.reqs)
            self.control.observe(batch.reqs, result.record, result.accept_lens.tolist(), result.times_ms)

    def end_request(self, req: Req) -> None:
        """Look at a request whose text is complete."""
        for part in self.parts:
            part.request_ended(req)

    def forward_batch_generation(
        self, batch: ScheduleBatch, on_publish: Publish | None = None, **_unused: object
    ) -> GenerationBatchResult:
        """Run one batch of the scheduler, a prefill or a decode step: none is idle without attention data parallelism.

        An exception goes on to SGLang, which ends the server over it; see docs/operating.md.
        """
        publish = on_publish or nothing
        self.step += 1
        try:
            return self._run(batch, publish)
        except Exception as error:
            logger.error(failure_report(error, self.step, len(batch.reqs)))  # noqa: TRY400 - SGLang logs the traceback
            raise

    def _run(self, batch: ScheduleBatch, publish: Publish) -> GenerationBatchResult:
        for part in self.parts:
            part.batch_comes(batch)
        if not (batch.forward_mode.is_extend() or batch.is_extend_in_batch):
            return self.decode(batch, publish)
        self.schedule.invalidate()  # what comes next is not a decode step
        return self._prefill(batch, publish)

    @torch.no_grad()
    def _prefill(self, batch: ScheduleBatch, publish: Publish) -> GenerationBatchResult:
        for part in self.parts:
            part.prefill_comes(batch)
        encoded = None if self.encoder is None else self.encoder.encode(batch)
        result, ids, positions = encoded or self._encode(batch)
        output = result.logits_output
        captured, embedded = output.hidden_states, output.mm_input_embeds
        output.hidden_states = output.mm_input_embeds = None
        if not batch.is_prefill_only:
            self._draw_first(batch, result)
        result.new_seq_lens = batch.seq_lens
        publish(batch.seq_lens)
        # Before the scheduler may hand the prompt to the radix cache: a later prefix hit reuses these draft rows.
        self.drafter.inject(ids if embedded is None else embedded, captured, positions, batch.out_cache_loc)
        self.drafter.remember(ids, batch.out_cache_loc)
        for part in self.parts:
            part.prefill_done(batch)
        result.next_draft_input = DSparkDraftInput(
            bonus_tokens=result.next_token_ids.to(torch.int64), new_seq_lens=batch.seq_lens.to(torch.int64)
        )
        return result

    def _encode(self, batch: ScheduleBatch) -> Encoded:
        """Have SGLang run the target over prompts.

        First tokens are ours: SGLang's sampler knows no seeds, no output before a retraction, and no grammar's masks on
        a CPU.
        """
        runner = self._target_worker.model_runner
        forward_batch = capturing_forward(batch, runner)
        with as_without_dspark(runner):
            result = self._target_worker.forward_batch_generation(
                batch=None, forward_batch=forward_batch, is_verify=not batch.is_prefill_only
            )
        return Encoded(result, forward_batch.input_ids, forward_batch.positions)

    def _draw_first(self, batch: ScheduleBatch, result: GenerationBatchResult) -> None:
        """Draw the token after each prompt, and the next one after a retraction and of requests that already run.

        They are drawn as a step without drafts does, so that a request's seed gives one token whichever draws it.
        """
        rows, output = self.sampling.read(batch.reqs), result.logits_output
        for part in self.logits_parts:
            part.first_logits(batch, output.next_token_logits)
        positions = batch.seq_lens.to(torch.int64)
        keys = round_keys(batch, positions, seed=self._target_worker.random_seed, step=self.step)
        indptr = torch.arange(len(batch.reqs) + 1, device=self.device)
        block, windows = DraftBlock.empty(len(batch.reqs), self.device), Windows(torch.zeros_like(positions), indptr)
        tokens = accept(block, windows, output.next_token_logits, positions, rows, keys).bonus_tokens
        self.agreement.broadcast_from_rank0(tokens)
        for part in self.logits_parts:
            part.first_tokens(batch, tokens)
        result.next_token_ids = tokens
        result.logits_output = self.described(
            batch, output, DrawnTokens(indptr, tokens, rows.filter_params.temperatures)
        )
        if all(req.sampling_params.max_new_tokens == 0 for req in batch.reqs):
            # Of prompts that are only scored; SGLang would give them one, since it takes no such batch for what it is.
            result.logits_output.next_token_logprobs = None

    def described(
        self, batch: ScheduleBatch, output: LogitsProcessorOutput, drawn: DrawnTokens
    ) -> LogitsProcessorOutput:
        """Return SGLang's ``LogitsProcessorOutput`` with what requests ask to know of their new tokens."""
        for part in self.parts:
            output = part.tokens_drawn(batch, output, drawn)
        return output


class SimulatedAcceptance(Part):
    """The draws of a server whose drafts are kept at random.

    Args:
        rates: of keeping a draft, by slot, when all before it are kept.
    """

    def __init__(self, rates: Sequence[float], runner: ModelRunner) -> None:
        logger.warning("DSPARK: acceptance is simulated (%s): texts have no meaning, only step times count", rates)
        self._device = torch.device(runner.device)
        rows = len(runner.req_to_token_pool.req_to_token)
        keys = torch.zeros(rows, dtype=torch.int64, device=self._device)
        self.draws = SimulatedDraws(keys, torch.from_numpy(acceptance_probabilities(rates)).to(self._device))

    def prefill_comes(self, batch: ScheduleBatch) -> None:
        """Note the keys of requests, which follow from their prompts."""
        keys = [crc32(array("q", req.origin_input_ids).tobytes()) for req in batch.reqs]
        self.draws.keys[batch.req_pool_indices] = host_index(keys, self._device)
