"""The DSPARK worker: one decode step as its stages."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from dspark_kernels import Accepted, DraftBlock, SamplingRows, accept, simulated_accept

from sglang_dspark.draft.cache import DraftCache
from sglang_dspark.engine.forward.graphs import graph_request_slots
from sglang_dspark.engine.forward.verify import run_verify
from sglang_dspark.engine.scheduler.batch import DSparkBatchResult, copy_drafts, decode_result, read_decode_batch
from sglang_dspark.engine.scheduler.options import BatchOptions, OptionsReader
from sglang_dspark.engine.scheduler.worker_base import Publish, SpecWorkerBase
from sglang_dspark.scheduling.ranking import ranked
from sglang_dspark.scheduling.schedule import Schedule
from sglang_dspark.stats.counters import Counters
from sglang_dspark.stats.history import History, Snapshot
from sglang_dspark.stats.metrics import Metrics
from sglang_dspark.step.choice import Choice
from sglang_dspark.step.state import Copies, DecodeBatch, Drafted, Rounds, VerifyPlan
from sglang_dspark.step.transfers import host_index
from sglang_dspark.worker.capabilities import capabilities, in_one_line
from sglang_dspark.worker.drafter import Drafter, NoDrafter
from sglang_dspark.worker.graph_stages import GraphStages, StepGraphs
from sglang_dspark.worker.preset_texts import PresetTexts
from sglang_dspark.worker.startup.late_kernels import report_late_kernels
from sglang_dspark.worker.startup.measure_steps import load_or_measure
from sglang_dspark.worker.startup.warm_up import warm_up
from sglang_dspark.worker.verify_plan import ragged_plan, top_plan, uniform_plan

logger = logging.getLogger(__name__)

_LOG_INTERVAL_S = 30.0


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
        self.counters = Counters(self.drafter.gamma, self.schedule.forecast.predicted)
        self.history = History(self.counters)
        self.asked = OptionsReader(self.max_verify)
        self.preset_texts = PresetTexts(self.max_verify)
        self.profile = self.acceptance_profile()
        self.graphs: StepGraphs | None = None
        self._logged_at = time.monotonic()
        self._warned = False

    def load_drafter(self) -> Drafter | NoDrafter:
        """The drafter that the options name."""
        if self.options.draft_free:
            return NoDrafter(self.options)
        path, runner = self.server_args.speculative_draft_model_path, self.target_worker.model_runner
        # SGLang has put --speculative-draft-load-format here by now, where it was given.
        dummy = self.server_args.load_format == "dummy"
        return Drafter.load(path, self.options, runner, self.device, dummy=dummy)

    def acceptance_profile(self) -> torch.Tensor | None:
        """[gamma] float64 probabilities by which drafts are kept in place of what the target says; None to ask it."""
        profile = self.options.acceptance_profile(self.drafter.gamma)
        if profile is None:
            return None
        logger.warning("DSPARK: acceptance is simulated (%s): texts mean nothing, step times do", profile)
        return torch.tensor(profile, dtype=torch.float64, device=self.device)

    @property
    def graph_depth(self) -> int:
        """Drafts per request that steps captured in CUDA graphs have room for; copied drafts are launched."""
        return 0 if self.options.draft_free else self.max_verify

    def allocate_draft_cache(self, num_slots: int) -> DraftCache | None:
        return self.drafter.allocate(num_slots, self.target_worker.model_runner.dtype)

    def prepare_to_serve(self) -> None:
        if self.on_gpu:
            slots = graph_request_slots(self.target_worker.model_runner)
            warm_up(self, slots)
            self.graphs = self.capture_graphs(slots)
            self.schedule.whole_batches = self.graphs is not None
        self.schedule.start(None if self.options.draft_free else load_or_measure(self))
        if self.on_gpu:
            report_late_kernels()
        logger.info("DSPARK: %s", in_one_line(self.capabilities()))

    def capture_graphs(self, slots: list[int]) -> StepGraphs | None:
        """Decode steps of up to so many requests as CUDA graphs; None where they run launch by launch."""
        if not slots:
            logger.info("DSPARK: decode steps run launch by launch: CUDA graphs are off")
            return None
        graphs = StepGraphs(self, slots)
        graphs.capture()
        return graphs

    @torch.no_grad()
    def decode(self, batch: Any, publish: Publish) -> DSparkBatchResult:
        """Choose, draft, plan, verify, accept, publish, commit."""
        rows, asked = self.sampling.read(batch.reqs), self.asked.read(batch.reqs)
        adjusted = self.adjustments.concern_step(batch)
        step = read_decode_batch(batch, rows, seed=self.target_worker.random_seed, step=self.step, adjusted=adjusted)
        copies = self.preset_texts.propose(batch.reqs, asked, step) if self.schedule.speculates else None
        choice = self.choose(batch, asked, copies)
        if choice.drafted:
            rows = self.drafted_sampling.read([batch.reqs[request] for request in choice.drafted])
        stages = self.stages(step, choice)
        with_confidence = asked.traced or choice.needs_confidence or self.schedule.policy.needs_confidence
        drafted = stages.draft(step, choice, rows, with_confidence).with_copies(copies)
        plan = stages.plan(step, drafted, choice)
        self.schedule.took(choice, len(step), len(plan.input_ids))
        windows = self.adjustments.windows(batch, plan)
        output, captured = stages.verify(batch, step, plan)
        if adjusted:
            self.adjustments.apply(batch, plan, windows, output.next_token_logits)
        accepted = stages.accept(step, drafted.block, plan, output)
        self.preset_texts.took(batch.reqs, asked, accepted)
        assert accepted.new_seq_lens is not None
        publish(accepted.new_seq_lens)
        self.adjustments.count(batch.reqs, accepted.out_tokens)
        stages.commit(plan, accepted, captured)
        self.schedule.clock.end_stages()
        rounds = Rounds(
            requests=[req.rid for req in batch.reqs],
            choice=choice,
            drafted=drafted.depths,
            verify_lens=plan.verify_lens[: len(step)].clone(),
            predictions=drafted.predictions,
            traced=copy_drafts(step, drafted.block) if asked.traced else None,
            copied=[0] * len(step) if copies is None else copies.lens,
            policy=self.schedule.policy.name,
            parked=self.schedule.parked,
        )
        return decode_result(batch, step, plan, output, accepted, rounds, in_graphs=stages is not self)

    def waits(self, batch: Any, asked: BatchOptions) -> bool:
        """Whether the host has waited for the step before, and the time between two choices is not an earlier one's."""
        return self.on_gpu and bool(asked.presets or batch.has_grammar)

    def choose(self, batch: Any, asked: BatchOptions, copies: Copies | None) -> Choice:
        """How deep to draft and how much to verify, and what is known by now of the steps before."""
        if self.waits(batch, asked):
            self.schedule.clock.interrupt()
        # Of the host: under overlap it does not know yet what the step under way commits.
        context = sum(req.kv_committed_len for req in batch.reqs) / len(batch.reqs)
        choice = self.schedule.choose([req.rid for req in batch.reqs], context, asked.limits_with(copies))
        if (timed := self.schedule.clock.last) is not None:
            self.counters.record_time(timed.requests, timed.measured_ms, timed.expected_ms)
        return self.agreement.share(choice)

    def stages(self, step: DecodeBatch, choice: Choice) -> DSparkWorker | GraphStages:
        """Who takes the stages of this step: its CUDA graphs where it fits into them, else the methods below."""
        staged = None if self.graphs is None else self.graphs.stage(step, choice)
        return staged or self

    def draft(self, step: DecodeBatch, choice: Choice, rows: SamplingRows, with_confidence: bool) -> Drafted:
        """Propose a block for the requests that the choice names; nothing for a plain step.

        Args:
            rows: sampling parameters of the requests that are drafted.
        """
        if choice.depth == 0:
            return Drafted(None, None, [0] * len(step))
        if choice.drafted is None:
            block = self.drafter.propose(step, choice.depth, with_confidence)
            depths = [choice.depth] * len(step)
        else:
            index = host_index(choice.drafted, self.device)
            block = self.drafter.propose(step.take(index, rows), choice.depth, with_confidence).spread(index, len(step))
            depths = [choice.depth * (request in choice.drafted) for request in range(len(step))]
        if not with_confidence:
            return Drafted(block, None, depths)
        return Drafted(block, self.schedule.forecast.predict(block.confidence_logits, len(step), choice.depth), depths)

    def plan(self, step: DecodeBatch, drafted: Drafted, choice: Choice) -> VerifyPlan:
        """Choose which drafts are verified, and lay their tokens out."""
        tokens = None if drafted.block is None else drafted.block.tokens
        if choice.is_uniform(len(step)):
            self.agreement.adopt(tokens)
            return uniform_plan(step, tokens, choice.depth)
        if self.on_gpu and choice.fixes_total:
            assert tokens is not None, "without drafts every step is uniform"
            order = ranked(choice, drafted)
            self.agreement.adopt(tokens)
            self.agreement.adopt(order)
            return top_plan(step, tokens, order, choice.budget)
        lens, total = self.schedule.verify_lens(choice, drafted, self.step)
        self.agreement.adopt(tokens, lens)
        if not choice.fixes_total:
            total = self.agreement.share(total)
        return ragged_plan(step, tokens, lens, len(step) + total)

    def verify(self, batch: Any, step: DecodeBatch, plan: VerifyPlan) -> tuple[Any, torch.Tensor]:
        """Run the target over the plan's rows; SGLang's output and the tapped hidden states [N, taps * d]."""
        return run_verify(self.target_worker, batch, step, plan)

    def accept(self, step: DecodeBatch, block: DraftBlock | None, plan: VerifyPlan, output: Any) -> Accepted:
        """Keep the drafts that the target agrees with and draw the token after them."""
        tokens = step.anchors.new_empty((len(step), 0)) if block is None else block.tokens
        proposal = None if block is None else block.probs if block.law is None else block.law
        accepted = accept(
            tokens,
            plan.verify_lens,
            output.next_token_logits,
            plan.indptr,
            proposal,
            step.rows,
            step.keys,
            copied=None if block is None else block.copied,
            prefix_lens=step.prefix_lens,
        )
        if self.profile is not None:
            accepted = simulated_accept(accepted, tokens, plan.verify_lens, self.profile, step.keys)
        assert accepted.new_seq_lens is not None
        self.agreement.adopt(accepted.accepted_lens, accepted.bonus_tokens, accepted.out_tokens, accepted.new_seq_lens)
        return accepted

    def commit(self, plan: VerifyPlan, accepted: Accepted, captured: torch.Tensor) -> None:
        """Write the draft K/V of the anchor and the accepted drafts of every request."""
        self.drafter.commit(plan, accepted, captured)

    def inject_context(
        self, input_ids: torch.Tensor, captured: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> None:
        self.drafter.inject(input_ids, captured, positions, slots)

    def before_other_work(self) -> None:
        self.schedule.clock.interrupt()

    def on_rounds(self, rounds: Rounds, running: list[int], accept_lens: list[int]) -> None:
        verify_lens = rounds.verify_lens.tolist()
        self.history.tick()
        self.counters.record(
            [rounds.drafted[request] for request in running],
            [verify_lens[request] for request in running],
            accept_lens,
            policy=rounds.policy,
            parked=rounds.parked,
            copied_lens=[rounds.copied[request] for request in running],
        )
        self.schedule.observe(rounds, running, accept_lens)
        now = time.monotonic()
        if now - self._logged_at < _LOG_INTERVAL_S:
            return
        self._logged_at = now
        logger.info("DSPARK: %s", self.counters)
        if self.counters.looks_miswired and not self._warned:
            self._warned = True
            logger.warning(
                "DSPARK: the accept length stays at %.2f. The drafter hardly predicts this target: was it trained for "
                "it, and with DeepSpec's conventions (0-based target_layer_ids whose output is tapped, anchor in "
                "slot 0)? Output stays exact but decoding is slower than without speculation.",
                self.counters.drafter_accept_length,
            )

    def report(self, history_s: int = 0) -> tuple[dict[str, Any], Snapshot]:
        known = {"block_size": self.drafter.gamma, "max_running_requests": self.max_running_requests}
        # The schedule first: it learns from what it has only noted so far.
        return known | self.schedule.report(), self.history.snapshot(history_s)

    @property
    def max_running_requests(self) -> int:
        """Requests that a step may have."""
        return int(self.target_worker.model_runner.max_running_requests)

    def capabilities(self) -> dict[str, Any]:
        return capabilities(self)

    def export_metrics(self, labels: dict[str, Any]) -> None:
        Metrics(self.counters, self.history, self.schedule_state, self.max_running_requests, labels).start()

    def schedule_state(self) -> tuple[str, bool]:
        """Name of the policy, and whether speculation rests."""
        return self.schedule.policy.name, self.schedule.parked

    def switch_policy(self, fields: dict[str, Any]) -> dict[str, Any]:
        self.schedule.switch(fields)
        policy = self.schedule.policy
        logger.info("DSPARK: policy %s from now on", policy.name)
        until_now = {"uptime_s": self.history.uptime_s, **self.counters.sums().total().counts()}
        return {"policy": policy.name, "schedule": policy.report(), "until_now": until_now}
