"""The DSPARK worker: one decode step as its stages."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from sglang_dspark.draft.cache import DraftCache
from sglang_dspark.engine.forward.graphs import graph_request_slots
from sglang_dspark.engine.forward.verify import run_verify
from sglang_dspark.engine.scheduler.batch import (
    DSparkBatchResult,
    copy_drafts,
    decode_result,
    most_words,
    read_decode_batch,
)
from sglang_dspark.engine.scheduler.draft_input import kv_lengths
from sglang_dspark.engine.scheduler.future_map import Relay, relay_of
from sglang_dspark.engine.scheduler.last_batch import LastBatch
from sglang_dspark.engine.scheduler.request_options import BatchOptions
from sglang_dspark.engine.scheduler.worker_base import Publish, SpecWorkerBase
from sglang_dspark.scheduling.schedule import Schedule
from sglang_dspark.step.decision import StepDecision
from sglang_dspark.step.device_time import DeviceTimer
from sglang_dspark.step.packed import PackedCopies
from sglang_dspark.step.record import StepRecord
from sglang_dspark.step.state import Copies, DecodeBatch, Drafted, VerifyPlan
from sglang_dspark.worker.capabilities import capabilities, in_one_line
from sglang_dspark.worker.drafter import Drafter, NoDrafter
from sglang_dspark.worker.graph_stages import StepGraphs
from sglang_dspark.worker.preset_texts import PresetTexts
from sglang_dspark.worker.reporting import Reporting
from sglang_dspark.worker.stages import EagerStages
from sglang_dspark.worker.staging import Staging
from sglang_dspark.worker.startup.late_kernels import report_late_kernels
from sglang_dspark.worker.startup.sps_cache import load_or_measure
from sglang_dspark.worker.startup.warm_up import hold_largest_step, on_stream_of_steps, warm_up

logger = logging.getLogger(__name__)


class DSparkWorker(SpecWorkerBase):
    """Draft, with the drafter or by presets, verify with the target, commit what was accepted."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.drafter = self.load_drafter()
        # Under overlap a CUDA device is one step behind the host; on a CPU they are the same.
        self.on_gpu = self.device.type == "cuda"
        lag = int(self.on_gpu and not self.server_args.disable_overlap_schedule)
        calibration = self.drafter.calibration(self.options, self.max_verify)
        self.schedule = Schedule(self.options, self.max_verify, calibration, self.device, lag)
        verify = partial(run_verify, self.target_worker)
        self.eager = EagerStages(self.drafter, self.schedule, verify, self.agreement, self.acceptance_profile())
        self.staging = Staging(self.eager)
        self.request_options = LastBatch(partial(BatchOptions.of, max_verify=self.max_verify))
        self.preset_texts = PresetTexts(self.max_verify)
        self.timer = DeviceTimer(self.device)
        self.relay: Relay | None = None

    def load_drafter(self) -> Drafter | NoDrafter:
        """The drafter that the options name."""
        drafter, runner = self.settled.drafter, self.target_worker.model_runner
        if drafter is None:
            return NoDrafter(self.options)
        return Drafter.load(drafter, self.options, runner, self.device, dummy=self.settled.dummy_draft)

    def acceptance_profile(self) -> torch.Tensor | None:
        """[gamma] float64 probabilities by which drafts are kept in place of what the target says; None to ask it."""
        profile = self.options.acceptance_profile(self.drafter.gamma)
        if profile is None:
            return None
        logger.warning("DSPARK: acceptance is simulated (%s): texts mean nothing, step times do", profile)
        return torch.tensor(profile, dtype=torch.float64, device=self.device)

    def allocate_draft_cache(self, num_slots: int) -> DraftCache | None:
        return self.drafter.allocate(num_slots, self.target_worker.model_runner.dtype)

    def prepare_to_serve(self) -> None:
        runner, staging = self.target_worker.model_runner, self.staging
        self.reporting = Reporting(self.schedule, self.drafter.gamma, int(runner.max_running_requests))
        words = most_words(int(runner.req_to_token_pool.size), self.max_verify, self.drafter.gamma)
        self.copies = PackedCopies(words, self.device)
        if self.on_gpu:
            slots = graph_request_slots(runner)
            warm_up(self.eager, self.target_worker, self.max_verify, slots)
            # Without overlap SGLang hands a step's outcome to the next one, and knows no future map.
            if not self.server_args.disable_overlap_schedule:
                self.relay = relay_of(runner.req_to_token_pool, self.device)
            staging.graphs = self.capture_graphs(slots)
        table = None
        with on_stream_of_steps(runner, overlap=not self.server_args.disable_overlap_schedule):
            if self.on_gpu:
                hold_largest_step(self.eager, self.target_worker, self.max_verify)
            if self.drafter.drafts:
                table = load_or_measure(staging, self.target_worker, self.server_args, self.max_verify)
        self.schedule.start(table, whole_batches=staging.graphs is not None)
        if self.on_gpu:
            report_late_kernels()
        logger.info("DSPARK: %s", in_one_line(self.capabilities()))

    def capture_graphs(self, slots: list[int]) -> StepGraphs | None:
        """Decode steps of up to so many requests as CUDA graphs; None where they run eagerly."""
        if not slots:
            logger.info("DSPARK: decode steps run eagerly: CUDA graphs are off")
            return None
        # Copied drafts are launched: without a drafter, captured steps are plain.
        depth = self.max_verify if self.drafter.drafts else 0
        graphs = StepGraphs(
            self.eager,
            self.target_worker.model_runner,
            slots,
            depth,
            seed=self.target_worker.random_seed,
            relay=self.relay,
            judges=self.check_logits is None,
        )
        graphs.capture()
        return graphs

    @torch.no_grad()
    def decode(self, batch: Any, publish: Publish) -> DSparkBatchResult:
        """Choose, draft, plan, verify, accept, publish, commit."""
        options, adjuster = self.request_options.read(batch.reqs), self.logits_adjuster.of_step(batch)
        step = self.read(batch, adjusted=adjuster.any)
        copies = self.preset_texts.propose(batch.reqs, options, step) if self.schedule.speculates else None
        decision = self.choose(batch, options, copies)
        span = self.timer.begin()
        stages = self.staging.of(step, decision)
        if decision.draft_requests and not stages.in_graphs:  # graphs draft for all
            step = self.with_drafted_rows(batch, step, decision.draft_requests)
        drafted = stages.draft(step, decision).with_copies(copies)
        plan = stages.plan(step, drafted, decision)
        adjuster.read(plan)
        output = stages.verify(batch, step, plan)
        if self.check_logits is not None:
            self.check_logits(output.logits_output.next_token_logits)
        adjuster.apply(plan, output.logits_output.next_token_logits)
        accepted = stages.accept(step, drafted, plan, output)
        publish(accepted.new_seq_lens)
        stages.commit(plan, accepted, output)
        self.schedule.done(decision, len(step), len(plan.input_ids))
        adjuster.count(accepted.out_tokens)
        self.preset_texts.took(batch.reqs, options, accepted)
        rounds = self.rounds(batch, options, step, decision, drafted, plan)
        result = decode_result(
            batch, step, plan, output.logits_output, accepted, rounds, self.copies, in_graphs=stages.in_graphs
        )
        span.end()
        result.span = span
        return result

    def read(self, batch: Any, *, adjusted: bool) -> DecodeBatch:
        """The step ahead, out of SGLang's batch."""
        rows = self.sampling.read(batch.reqs)
        return read_decode_batch(batch, rows, seed=self.target_worker.random_seed, step=self.step, adjusted=adjusted)

    def choose(self, batch: Any, options: BatchOptions, copies: Copies | None) -> StepDecision:
        """Return how deep to draft and how much to verify, and what is known by now of the steps before."""
        if self.on_gpu and (options.presets or batch.has_grammar):
            # The host has waited for the step before: the time between two choices is not an earlier one's.
            self.schedule.interrupt()
        # Of the host: under overlap it does not know yet what the step under way commits.
        context = sum(kv_lengths(batch.reqs)[0]) / len(batch.reqs)
        limits = options.limits_with(copies)
        decision = self.schedule.choose([req.rid for req in batch.reqs], context, limits, traced=options.traced)
        self.reporting.record_time()
        return self.agreement.share(decision)

    def with_drafted_rows(self, batch: Any, step: DecodeBatch, drafted: Sequence[int]) -> DecodeBatch:
        """``step`` with the sampling parameters of the requests that are drafted, which are not all."""
        return replace(step, drafted_rows=self.drafted_sampling.read([batch.reqs[r] for r in drafted]))

    def rounds(
        self,
        batch: Any,
        options: BatchOptions,
        step: DecodeBatch,
        decision: StepDecision,
        drafted: Drafted,
        plan: VerifyPlan,
    ) -> StepRecord:
        """Return what the step did."""
        return StepRecord(
            requests=[req.rid for req in batch.reqs],
            decision=decision,
            drafted=drafted.depths,
            verify_lens=plan.verify_lens[: len(step)],
            confidence=drafted.confidence,
            traced=copy_drafts(step, drafted.block) if options.traced else None,
            copied=drafted.copied or [0] * len(step),
            policy=self.schedule.policy.name,
            parked=self.schedule.parked,
        )

    def inject_context(
        self, input_ids: torch.Tensor, captured: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> None:
        self.drafter.inject(input_ids, captured, positions, slots)

    def before_other_work(self) -> None:
        self.schedule.interrupt()

    def on_rounds(self, rounds: StepRecord, running: list[int], accept_lens: list[int]) -> None:
        self.reporting.record(rounds, running, accept_lens)
        self.schedule.observe(rounds, running, accept_lens)
        self.reporting.log()

    def on_times(self, device_ms: float, waited_ms: float) -> None:
        self.schedule.processed(device_ms, waited_ms)

    def report(self, history_s: int = 0) -> dict[str, Any]:
        return self.reporting.report(history_s)

    def capabilities(self) -> dict[str, Any]:
        return capabilities(self.server_args, self.target_worker.model_runner, self.staging, self.max_verify)

    def export_metrics(self, labels: dict[str, Any]) -> None:
        self.reporting.export_metrics(labels)

    def switch_policy(self, fields: dict[str, Any]) -> dict[str, Any]:
        self.schedule.switch(fields)
        policy = self.schedule.policy
        logger.info("DSPARK: policy %s from now on", policy.name)
        return {"policy": policy.name, "schedule": policy.report(), "until_now": self.reporting.until_now()}
