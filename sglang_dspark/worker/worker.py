"""The DSPARK worker: one decode step as its stages."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import torch
from dspark_kernels import Accepted, DraftBlock, SamplingRows, accept, markov_sample, prepare, prepare_ref
from dspark_kernels.kv_inject import CommitRows

from sglang_dspark.calibration.online import OnlineCalibration
from sglang_dspark.calibration.sts import StsCalibration
from sglang_dspark.draft.cache import DraftCache
from sglang_dspark.draft.config import DraftConfig
from sglang_dspark.draft.reduced_vocabulary import ProposalHeads, load_token_ids
from sglang_dspark.draft.weights import load_draft_model
from sglang_dspark.engine.batch import DSparkBatchResult, copy_drafts, decode_result, read_decode_batch
from sglang_dspark.engine.graphs import graph_request_slots
from sglang_dspark.engine.speculation import BatchOptions, OptionsReader
from sglang_dspark.engine.target import Target
from sglang_dspark.engine.verify import run_verify
from sglang_dspark.engine.worker_base import Publish, SpecWorkerBase
from sglang_dspark.prefix_scheduler.choice import Choice
from sglang_dspark.stats.counters import Counters
from sglang_dspark.stats.history import History
from sglang_dspark.stats.metrics import Metrics
from sglang_dspark.step.state import Copies, DecodeBatch, Drafted, Rounds, VerifyPlan
from sglang_dspark.step.transfers import host_index
from sglang_dspark.worker.capabilities import capabilities, in_one_line
from sglang_dspark.worker.draft_attention import block_attend
from sglang_dspark.worker.preset_texts import PresetTexts
from sglang_dspark.worker.schedule import Schedule
from sglang_dspark.worker.sps import load_or_measure
from sglang_dspark.worker.step_graphs import GraphStages, StepGraphs
from sglang_dspark.worker.verify_plan import ragged_plan, uniform_plan

logger = logging.getLogger(__name__)

_LOG_INTERVAL_S = 30.0


class DSparkWorker(SpecWorkerBase):
    """Draft with the DSpark drafter, verify with the target, commit what was accepted."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.gamma = self.load_drafter()
        # Under overlap a CUDA device is one step behind the host; on a CPU they are the same.
        self.on_gpu = self.device.type == "cuda"
        lag = int(self.on_gpu and not self.server_args.disable_overlap_schedule)
        self.schedule = Schedule(self.options, self.max_verify, self.make_calibration(), self.device, lag)
        self.counters = Counters(self.gamma, self.schedule.forecast.predicted)
        self.history = History(self.counters)
        self.asked = OptionsReader(self.max_verify)
        self.preset_texts = PresetTexts(self.max_verify)
        self.graphs: StepGraphs | None = None
        self._logged_at = time.monotonic()
        self._warned = False

    def load_drafter(self) -> int:
        """Load the drafter beside the target; returns the drafts of a block."""
        path = self.server_args.speculative_draft_model_path
        self.draft_config = DraftConfig.from_pretrained(path)
        self.target = Target(self.target_worker.model_runner, self.draft_config)
        self.drafter = load_draft_model(path, dtype=self.target.dtype, device=self.device)
        shared = self.target.share_with(self.drafter)
        self.heads = ProposalHeads(self.drafter, load_token_ids(path, self.draft_config.vocab_size))
        logger.info("DSPARK drafter %s loaded; read from the target: %s", path, ", ".join(shared) or "nothing")
        return self.options.gamma(self.draft_config.block_size)

    @property
    def mask_token_id(self) -> int:
        """What stands in the slots of a block after the anchor."""
        return self.draft_config.mask_token_id

    @property
    def graph_depth(self) -> int:
        """Drafts per request that steps captured in CUDA graphs have room for."""
        return self.max_verify

    def make_calibration(self) -> OnlineCalibration | None:
        """Calibration of the drafter's confidence head; None without one."""
        if self.drafter.confidence is None:
            return None
        path, temperatures = self.options.confidence_sts_path, None
        if path is not None:
            temperatures = StsCalibration.load(Path(path), self.gamma).temperatures[: self.max_verify]
        return OnlineCalibration(self.max_verify, temperatures)

    def allocate_draft_cache(self, num_slots: int) -> DraftCache:
        cache = DraftCache(self.draft_config, num_slots, self.target.dtype, self.device)
        logger.info("DSPARK draft K/V: %d slots, %.1f MiB", num_slots, cache.num_bytes / 2**20)
        return cache

    def prepare_to_serve(self) -> None:
        if self.on_gpu:
            self.graphs = self.capture_graphs()
            self.schedule.whole_batches = self.graphs is not None
        self.schedule.start(load_or_measure(self))
        self.announce()

    def announce(self) -> None:
        """Say in the log what this server can do."""
        logger.info("DSPARK: %s", in_one_line(self.capabilities()))

    def capture_graphs(self) -> StepGraphs | None:
        """Decode steps as CUDA graphs; None where they run launch by launch."""
        slots = graph_request_slots(self.target_worker.model_runner)
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
            block = self.draft_block(step, choice.depth, with_confidence)
            depths = [choice.depth] * len(step)
        else:
            index = host_index(choice.drafted, self.device)
            block = self.draft_block(step.take(index, rows), choice.depth, with_confidence).spread(index, len(step))
            depths = [choice.depth * (request in choice.drafted) for request in range(len(step))]
        if not with_confidence:
            return Drafted(block, None, depths)
        return Drafted(block, self.schedule.forecast.predict(block.confidence_logits, len(step), choice.depth), depths)

    def draft_block(
        self,
        step: DecodeBatch,
        depth: int,
        with_confidence: bool,
        layout: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> DraftBlock:
        """Run the drafter over the blocks of all requests of ``step`` and sample their first ``depth`` slots.

        Args:
            layout: ids and positions [bs, gamma] of the blocks, where they are laid out already.
        """
        bs, gamma, drafter = len(step), self.gamma, self.drafter
        ids, positions = layout or self.lay_out_blocks(step)
        attend = block_attend(self.cache, step, gamma, self.draft_config)
        hidden = drafter.forward_block(drafter.embed(ids.view(-1)), positions.view(-1), attend).view(bs, gamma, -1)
        # The backbone needs the whole block (its slots see each other), the heads only what may be verified. Two
        # dimensions, or the CPU's bfloat16 product with the LM head takes a path that is ten times slower.
        hidden = hidden[:, :depth].reshape(bs * depth, -1)
        confidence = drafter.confidence if with_confidence else None
        return markov_sample(
            self.heads.base_logits(hidden).view(bs, depth, -1),
            hidden.view(bs, depth, -1),
            step.anchors,
            self.heads.markov,
            confidence,
            step.rows,
            step.keys,
            self.heads.vocabulary,
            self.heads.weights if self.on_gpu else None,
        )

    def lay_out_blocks(self, step: DecodeBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and positions [bs, gamma] of the blocks: the anchor, and masks after it."""
        lay_out = prepare if self.on_gpu else prepare_ref
        return lay_out(step.requests, self.gamma, self.mask_token_id).block(len(step))

    def plan(self, step: DecodeBatch, drafted: Drafted, choice: Choice) -> VerifyPlan:
        """Choose which drafts are verified, and lay their tokens out."""
        tokens = None if drafted.block is None else drafted.block.tokens
        if choice.is_uniform(len(step)):
            self.agreement.adopt(tokens)
            return uniform_plan(step, tokens, choice.depth)
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
        assert accepted.new_seq_lens is not None
        self.agreement.adopt(accepted.accepted_lens, accepted.bonus_tokens, accepted.out_tokens, accepted.new_seq_lens)
        return accepted

    def commit(self, plan: VerifyPlan, accepted: Accepted, captured: torch.Tensor) -> None:
        """Write the draft K/V of the anchor and the accepted drafts of every request."""
        rows = CommitRows(plan.columns, plan.requests, accepted.accepted_lens)
        if not self.on_gpu:
            kept = rows.kept().nonzero().squeeze(1)
            self.inject_context(plan.input_ids[kept], captured[kept], plan.positions[kept], plan.slots[kept])
        else:
            # How many rows are kept is not known on the host, so all of them are projected.
            self.inject_context(plan.input_ids, captured, plan.positions, plan.slots, rows)

    def inject_context(
        self,
        input_ids: torch.Tensor,
        captured: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        rows: CommitRows | None = None,
    ) -> None:
        self.cache.inject(self.drafter, self.target.features(input_ids, captured), positions, slots, rows)

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

    def report(self, history_s: int = 0) -> dict[str, Any]:
        known = {"block_size": self.gamma, "max_running_requests": self.max_running_requests}
        # The schedule first: it learns from what it has only noted so far.
        report = known | self.schedule.report() | self.history.report()
        for span in (report, report["recent"]):
            running = span["running_requests"]
            span["occupancy"] = None if running is None else running / self.max_running_requests
        return report | {"history": self.history.series(history_s)} if history_s else report

    @property
    def max_running_requests(self) -> int:
        """Requests that a step may have."""
        return int(self.target_worker.model_runner.max_running_requests)

    def describe_drafter(self) -> dict[str, Any] | None:
        """JSON: what is known of the checkpoint; None without a drafter."""
        draft, vocabulary = self.draft_config, self.heads.vocabulary
        return {
            "path": self.server_args.speculative_draft_model_path,
            "block_size": draft.block_size,
            "num_hidden_layers": draft.num_hidden_layers,
            "target_layer_ids": list(draft.target_layer_ids),
            "markov_head_type": draft.markov_head_type if draft.markov_rank else None,
            "markov_rank": draft.markov_rank,
            "confidence_head": draft.enable_confidence_head,
            "vocab_size": draft.vocab_size if vocabulary is None else len(vocabulary.token_ids),
        }

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
