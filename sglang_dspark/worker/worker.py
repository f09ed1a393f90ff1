"""The DSPARK worker: decode steps, and what SGLang asks about them."""

from __future__ import annotations

import logging
from functools import partial
from math import inf
from typing import Any

import torch

from sglang_dspark.engine.batch import (
    CachedByBatch,
    DSparkBatchResult,
    copy_drafts,
    decode_result,
    most_words,
    read_decode_batch,
)
from sglang_dspark.engine.cpu_linear import LinearLayers, replace_linear
from sglang_dspark.engine.graphs import Relay, graph_request_slots
from sglang_dspark.engine.logits_processing import NanCheck
from sglang_dspark.engine.measure_steps import Stepper, load_or_measure, table_key
from sglang_dspark.engine.part import DrawnTokens, part_of
from sglang_dspark.engine.request_options import BatchOptions
from sglang_dspark.engine.same_bits import same_bits
from sglang_dspark.engine.scheduler import DecodeInfo
from sglang_dspark.engine.step_control import StepControl
from sglang_dspark.engine.target import weights_region
from sglang_dspark.engine.verify import run_verify
from sglang_dspark.engine.worker_base import Publish, SimulatedAcceptance, SpecWorkerBase
from sglang_dspark.gpu_paths import is_on
from sglang_dspark.scheduling.policies import ExtraRows
from sglang_dspark.scheduling.schedule import Schedule
from sglang_dspark.scheduling.sps_table import SpsTable
from sglang_dspark.step.decision import ForcedRows, StepDecision, StepRecord, drafted
from sglang_dspark.step.packed import DeviceTimer, PackedCopies
from sglang_dspark.step.state import DecodeBatch, StepOutcome
from sglang_dspark.worker.drafter import Drafter, NoDrafter
from sglang_dspark.worker.eager import EagerExecutor, ExtraRowsExecutor
from sglang_dspark.worker.graphs import CapturedSteps, ExecutorSelector
from sglang_dspark.worker.self_check import SelfCheck
from sglang_dspark.worker.warm_up import (
    MeasuredSteps,
    check_graphs,
    hold_largest_step,
    log_rows_against_steps,
    on_stream_of_steps,
    report_late_kernels,
    warm_up,
)

logger = logging.getLogger(__name__)


class DSparkWorker(SpecWorkerBase):
    """Draft, verify with the target, commit what was accepted."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.drafter = self.load_drafter()
        # Under overlap a CUDA device is one step behind the host; on a CPU they are the same.
        self.on_gpu = self.device.type == "cuda"
        lag = int(self.on_gpu and not self.server_args.disable_overlap_schedule)
        calibration = self.drafter.calibration(self.options, self.max_verify)
        self.schedule = Schedule(self.options, self.max_verify, calibration, self.device, lag)
        forward = partial(run_verify, self.target_worker)
        self.eager = EagerExecutor(self.drafter, self.schedule, forward, self.agreement)
        self.executors = ExecutorSelector(self.eager)
        asked = partial(BatchOptions.of, max_verify=self.max_verify, speculates=self.drafter.drafts_for)
        self.request_options = CachedByBatch(asked)
        self.timer = DeviceTimer(self.device)
        self.relay: Relay | None = None
        self.linear_layers: LinearLayers | None = None
        self.same_bits = False
        self.self_check: dict[str, Any] | None = None

    def load_drafter(self) -> Drafter | NoDrafter:
        """Return the drafter that the options name."""
        drafter, runner = self.settled.drafter, self.target_worker.model_runner
        if drafter is None:
            return NoDrafter(self.options, int(runner.model_config.vocab_size), self.device, self.candidates)
        with weights_region(runner):
            return Drafter.load(
                drafter,
                self.options,
                runner,
                self.device,
                dummy=self.settled.dummy_draft,
                window=self.settled.draft_window,
                candidates=self.candidates,
            )

    def prepare_to_serve(self) -> None:
        runner = self.target_worker.model_runner
        if (rates := self.options.acceptance_profile(self.drafter.gamma)) is not None:
            simulated = SimulatedAcceptance(rates, runner)
            self.parts, self.eager.draws = (*self.parts, simulated), simulated.draws
        self.control = StepControl(self.schedule, self.agreement, self.parts, self.on_gpu)
        takes = partial(is_on, unproven=self.options.unproven, on_gpu=self.on_gpu)
        self.schedule.forecast.in_one_launch = takes("survivals")
        if self.draft_pool is None and takes("held-rows"):  # SGLang may copy draft K/V of a pool at any time
            self.drafter.hold_rows()
        self.same_bits = asked = self.settled.same_bits
        if not self.on_gpu:
            self.linear_layers = replace_linear(runner, self.drafter.linear_layers, self.agreement, same_bits=asked)
            self.same_bits = same_bits(runner, self.linear_layers, asked=asked)
        words = most_words(int(runner.req_to_token_pool.size), self.max_verify, self.drafter.gamma)
        self.copies = PackedCopies(words, self.device)
        if self.on_gpu:
            slots = graph_request_slots(runner)
            check = SelfCheck(self.device) if self.options.self_check else None
            warm_up(self.eager, self.target_worker, self.max_verify, slots, self.logits_parts, check)
            # Without overlap SGLang hands a step's outcome to the next one, and knows no future map.
            if not self.server_args.disable_overlap_schedule:
                self.relay = Relay(len(runner.req_to_token_pool.req_to_token), self.device)
            self.capture_graphs(slots)
            if check is not None:
                self.check_steps(check)
        table = None
        with on_stream_of_steps(runner, overlap=not self.server_args.disable_overlap_schedule):
            if self.on_gpu:
                hold_largest_step(self.eager, self.target_worker, self.max_verify, self.logits_parts)
            if self.drafter.num_drawn:
                table = self.step_times()
        self.drafter.forget_held()
        self.schedule.start(table, fixed_draft_shape=self.executors.captured is not None)
        if self.on_gpu:
            report_late_kernels()
        for part in self.parts:
            part.ready()

    def step_times(self) -> SpsTable | None:
        """Return the measured times of steps; None for a policy that needs none."""
        tiers = None if self.executors.captured is None else self.executors.captured.tiers
        stepper = Stepper(
            self.target_worker,
            self.agreement,
            self.max_verify,
            of=lambda dummy: MeasuredSteps(self.executors, dummy, self.max_verify),
            tiers=() if tiers is None else tiers.timed,
        )
        key = table_key(
            self.target_worker,
            self.server_args,
            draft_path=self.settled.draft_path,
            block_size=self.drafter.gamma,
            max_verify=self.max_verify,
            cuda_graphs="none" if tiers is None else tiers.digest,
        )
        if not self.on_gpu:
            ways = () if self.linear_layers is None else self.linear_layers.ways.by_rows
            key["linear_layers"] = ", ".join(dict.fromkeys(ways))
        for timed in (self.settled.timed, *(part.timed for part in self.parts)):
            key |= timed
        return load_or_measure(stepper, self.options, key)

    def capture_graphs(self, slots: list[int]) -> None:
        """Capture decode steps of up to so many requests as CUDA graphs; none of no requests."""
        if not slots:
            logger.info("DSPARK: decode steps run eagerly: CUDA graphs are off")
            return
        # Without a drafter, captured steps are plain: only the device knows how many drafts there are.
        depth = self.max_verify if self.drafter.num_drawn else 0
        captured = CapturedSteps(
            self.eager,
            self.target_worker.model_runner,
            slots,
            depth,
            seed=self.target_worker.random_seed,
            relay=self.relay,
            parts=self.parts,
            fuses=part_of(self.parts, NanCheck) is None,
        )
        captured.capture()
        self.executors.add_graphs(captured)
        self.captured_at = self.addresses()

    def check_steps(self, check: SelfCheck) -> None:
        """Compare CUDA graphs with what they were captured from, and rows with single steps; say what agreed."""
        check_graphs(self.executors, self.target_worker, self.max_verify, check)
        log_rows_against_steps(self.eager, self.target_worker, self.max_verify)
        check.finish()
        torch.cuda.empty_cache()  # references take more memory than steps
        self.self_check = check.describe()

    def addresses(self) -> list[int]:
        """Return where the target's weights lie."""
        return [weight.data_ptr() for weight in self.target_worker.model_runner.model.parameters()]

    @torch.no_grad()
    def decode(self, batch: Any, publish: Publish, extra: ForcedRows | None = None) -> DSparkBatchResult:
        """Choose, draft, plan, verify, accept, publish, commit.

        Args:
            extra: rows after those of the verification; None if there are none.
        """
        options = self.request_options.read(batch.reqs)
        if self.request_options.changed:  # slots of a request that has left may be others' from now on
            self.drafter.settle()
        adjusting = [found for part in self.logits_parts if (found := part.step_comes(batch)) is not None]
        step = self.read(batch, adjusted=bool(adjusting))
        size = None
        if extra is not None:
            rows = len(extra.step) + extra.num_drafts
            size = ExtraRows(len(extra.step), rows, extra.context, self.options.max_gap_ms or inf)
        room = batch.spec_info.room
        decision = self.control.choose(batch, options if room is None else options.within(room), size)
        span = self.timer.begin()
        executor = self.executors.select(step, decision)
        if extra is not None:
            executor = ExtraRowsExecutor(executor, self.executors.select, extra)
        outcome = executor.run(step, decision, adjusting, publish)
        self.schedule.end_step(decision, len(step), len(outcome.plan.input_ids))
        tokens = outcome.accepted.out_tokens
        for part in adjusting:
            part.accepted(tokens)
        drawn = DrawnTokens(outcome.plan.indptr, tokens, step.rows.filter_params.temperatures)
        output = self.described(batch, outcome.target.logits_output, drawn)
        record = self.record(batch, options, step, decision, outcome)
        result = decode_result(outcome, output, record, self.copies, span, in_graphs=executor.in_graphs)
        for feature in self.parts:
            feature.step_launched(outcome.plan, result)
        span.end()
        return result

    def verify(self, given: ForcedRows) -> bool:
        """Run the target over given rows only; return whether by a graph."""
        draft, decision = drafted(given.tokens, given.ranks, given.num_drafts)
        executor = self.executors.select(given.step, decision)
        executor.stage(given.step, decision)
        plan = executor.plan(given.step, executor.use_external_draft(draft), decision)
        given.read(plan, executor.verify(given.step, plan), 0)
        return executor.in_graphs

    def read(self, batch: Any, *, adjusted: bool) -> DecodeBatch:
        """Read the step ahead out of SGLang's batch."""
        reqs = batch.reqs
        return read_decode_batch(
            batch,
            self.sampling.read(reqs),
            rows_of=lambda drafted: self.drafted_sampling.read([reqs[request] for request in drafted]),
            seed=self.target_worker.random_seed,
            step=self.step,
            adjusted=adjusted,
            rules=None if self.candidates is None else self.candidates.rules(batch),
        )

    def record(
        self, batch: Any, options: BatchOptions, step: DecodeBatch, decision: StepDecision, outcome: StepOutcome
    ) -> StepRecord:
        """Return the record of a step."""
        draft = outcome.draft
        return StepRecord(
            requests=options.ids,
            decision=decision,
            drafted=draft.draft_lens if self.drafter.num_drawn else [0] * len(step),
            verify_lens=outcome.plan.verify_lens[: len(step)],
            confidence=draft.confidence,
            traced=copy_drafts(step, draft.block) if options.traced else None,
            chains=draft.block.chains,
            num_drawn=self.drafter.num_drawn,
            policy=self.schedule.policy.name,
            parked=self.schedule.parked,
            behind=self.schedule.last_time,
        )

    def weights_changed(self, *, new_drafter: bool = False) -> None:
        """Renew what was copied of weights, and forget what was learned of those before."""
        self.drafter.follow_target()
        if self.linear_layers is not None:
            self.linear_layers.follow()
        if self.executors.captured is not None and self.addresses() != self.captured_at:
            logger.warning(
                "DSPARK: SGLang has put new weights of this target elsewhere, where CUDA graphs do not read them: "
                "decode steps run eagerly until a restart"
            )
            self.executors.drop_graphs()
        self.control.forget(new_drafter=new_drafter)

    def decoding(self) -> DecodeInfo:
        """Return how the server decodes."""
        drafter = self.drafter.describe()
        drafting = (
            "requests with a preset or prediction speculate" if drafter is None else "the drafter fits the target"
        )
        return DecodeInfo(
            f"selected by --speculative-algorithm, and {drafting}",
            self.drafter.gamma,
            cuda_graphs=self.executors.captured is not None,
            drafter=drafter,
            proposed=self.drafter.proposed,
            same_bits=self.same_bits,
            self_check=self.self_check,
        )
