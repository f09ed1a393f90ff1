"""SGLang's own worker, whose steps our schedule decides, and which learns from their outcomes."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.dspark_components.dspark_planner import alloc_verify_window
from sglang.srt.speculative.dspark_components.dspark_worker_v2 import DSparkWorkerV2

from sglang_dspark.engine import hooks
from sglang_dspark.engine.agreement import Agreement
from sglang_dspark.engine.batch import CachedByBatch, DSparkBatchResult, most_words
from sglang_dspark.engine.hooks import Moment, check_called, hook
from sglang_dspark.engine.measure_steps import DummyBatch, Stepper, load_or_measure, table_key
from sglang_dspark.engine.part import parts_of
from sglang_dspark.engine.request_options import BatchOptions, carry_counts
from sglang_dspark.engine.scheduler import DecodeInfo
from sglang_dspark.engine.sglang_types import GenerationBatchResult, ScheduleBatch, ServerArgs
from sglang_dspark.engine.step_control import StepControl
from sglang_dspark.features.builtin_worker import MODE, scheduled
from sglang_dspark.features.builtin_worker.step import Rows, ScheduledStep
from sglang_dspark.gpu_paths import is_on
from sglang_dspark.scheduling.online_calibration import OnlineCalibration
from sglang_dspark.scheduling.schedule import Schedule
from sglang_dspark.scheduling.sps_table import SpsTable
from sglang_dspark.step.decision import StepDecision, StepRecord
from sglang_dspark.step.packed import DeviceTimer, PackedCopies
from sglang_dspark.step.selection import FixedLength


class ScheduledWorker(DSparkWorkerV2):
    """SGLang's own worker under our schedule.

    It drafts whole blocks or nothing, and verifies as many drafts of each request as it is told. That follows from
    outcomes of earlier steps and from confidences that do not know the draft in question, as with our own worker, so
    the texts stay the target's.

    Attributes:
        step: under way, or the one to be measured.
    """

    drafter = None
    server_args: Any  # resolved
    _proposer: Any
    _verify_planner: Any

    @torch.no_grad()
    def init_cuda_graphs(self) -> None:
        """Take over the steps, which can run from here on: their times are measured, if the policy needs them."""
        super().init_cuda_graphs()
        args, device = self.server_args, torch.device(self.device)
        self.server_args, self.settled = resolving_view(args), scheduled(args)
        self.options = self.settled.config
        self.agreement = Agreement(get_parallel().tp_group)
        if not self.agreement.leads:
            logging.getLogger("sglang_dspark").setLevel(logging.WARNING)
        runner = self.target_worker.model_runner
        by_request, graphs = self.settled.by_request, runner.decode_cuda_graph_runner
        tiers = tuple(graphs.capture_num_tokens) if by_request and graphs is not None else ()
        self.rows = Rows(self.gamma + 1, by_request, tiers)
        on_gpu = device.type == "cuda"
        self.overlaps = on_gpu and not self.server_args.disable_overlap_schedule
        calibration = None
        if self.settled.has_confidence_head:
            calibration = OnlineCalibration.from_file(self.options.confidence_sts_path, self.gamma, self.gamma)
        self.schedule = Schedule(self.options, self.gamma, calibration, device, int(self.overlaps))
        self.schedule.forecast.in_one_launch = is_on("survivals", self.options.unproven, on_gpu=on_gpu)
        self.parts = parts_of(self, args, ours=False)
        self.control = StepControl(self.schedule, self.agreement, self.parts, on_gpu)
        self._request_options = CachedByBatch(partial(BatchOptions.of, max_verify=self.gamma))
        self._timer = DeviceTimer(device)
        self._copies = PackedCopies(most_words(int(runner.req_to_token_pool.size), self.gamma, self.gamma), device)
        self.step = self.whole_blocks(0)
        self._draft, self._proposer.propose = self._proposer.propose, self._propose
        self._verify_planner.schedule_layout = self._lay_out
        self.schedule.start(self._step_times(), fixed_draft_shape=True, uniform=not by_request)
        for part in self.parts:
            part.ready()
        check_called(Moment.READY)

    def _step_times(self) -> SpsTable | None:
        """Return the measured times of steps; None for a policy that needs none."""
        measured = partial(MeasuredSteps, self)
        stepper = Stepper(self.target_worker, self.agreement, self.gamma, of=measured, tiers=self.rows.tiers)
        rows = ",".join(map(str, self.rows.tiers)) if self.rows.by_request else "whole blocks"
        key = table_key(
            self.target_worker,
            self.server_args,
            draft_path=self.server_args.speculative_draft_model_path,
            block_size=self.gamma,
            max_verify=self.gamma,
            cuda_graphs=f"SGLang's own, rows: {rows}",
        ) | {"enable_lora": str(self.server_args.enable_lora)}
        return load_or_measure(stepper, self.options, key)

    def whole_blocks(self, requests: int, context: float = 0.0) -> ScheduledStep:
        """Return a step that drafts and verifies all that it can, of texts of ``context`` tokens on average."""
        decision = StepDecision(self.gamma, FixedLength(), with_confidence=False, context=context)
        return ScheduledStep(decision, requests, self.rows)

    def forward_batch_generation(self, batch: ScheduleBatch, *args: object, **kwargs: object) -> GenerationBatchResult:
        """Run one batch of the scheduler; a decode step as the schedule decides, before anything of it is drafted.

        No batch is idle: SGLang makes idle ones for attention data parallelism, which is refused.
        """
        run = partial(super().forward_batch_generation, batch, *args, **kwargs)
        if batch.forward_mode.is_extend():
            self.schedule.invalidate()  # what comes next is not a decode step
            return run()
        reqs = batch.reqs
        options = self._request_options.read(reqs)
        decision = self.control.choose(batch, options)
        fits = self.rows.fit(len(reqs))
        step = ScheduledStep(decision, len(reqs), self.rows) if fits else self.whole_blocks(len(reqs), decision.context)
        self.step, span = step, self._timer.begin()
        result = run()
        self.schedule.end_step(step.decision, len(reqs), step.num_rows)
        record = self._record(batch, options, step)
        # Views of a graph's buffers, which the next step overwrites. The longest types come first.
        pending = self._copies.pack([result.next_token_ids, *record.tensors, result.accept_lens])
        span.end()
        # SGLang would copy what the record says, and lengths that are among what is packed.
        left_out = dict.fromkeys(("accept_lens", "cap_lens", "block_accept_lens"))
        return ScheduledResult(**vars(result) | left_out, record=record, pending=pending, span=span)

    def _propose(self, *, draft_input: Any, sampling_info: Any, **given: object) -> Any:
        """Draft, or not, as the step says; SGLang's proposer drafts in every step.

        Returns:
            The proposal, without the confidences, which the schedule replaces.
        """
        draft = partial(self._draft, draft_input=draft_input, sampling_info=sampling_info, **given)
        return self.step.propose(draft, draft_input.bonus_tokens, sampling_info)

    def _lay_out(self, **_given: object) -> Any:
        """Return how many rows of each request are verified: as many as the schedule decides."""
        return self.step.lay_out(self.schedule.forecast, self.agreement)

    def _record(self, batch: ScheduleBatch, options: BatchOptions, step: ScheduledStep) -> StepRecord:
        assert step.verify_lens is not None, "every step verifies"
        traced = None
        if options.traced:
            columns = batch.seq_lens.to(torch.int64)[:, None], step.anchors.view(-1, 1), step.drafts
            traced = torch.cat(columns, dim=1)
        return StepRecord(
            requests=options.ids,
            decision=step.decision,
            drafted=step.decision.draft_lens(len(batch.reqs)),
            verify_lens=step.verify_lens,
            confidence=step.confidence,
            traced=traced,
            policy=self.schedule.policy.name,
            parked=self.schedule.parked,
            behind=self.schedule.last_time,
        )

    def observe(self, result: ScheduledResult, batch: ScheduleBatch) -> None:
        """Learn from a result whose tensors have reached the host; SGLang has taken its tokens."""
        check_called(Moment.ANSWERED)
        assert result.record is not None, "every step has a record"
        self.control.observe(batch.reqs, result.record, result.accept_lens.tolist(), result.times_ms)

    def weights_changed(self, *, new_drafter: bool = False) -> None:
        """Forget what was learned of the weights before; SGLang's drafter shares layers with the target."""
        self.control.forget(new_drafter=new_drafter)

    def decoding(self) -> DecodeInfo:
        """Return how the server decodes."""
        config = self.draft_model_runner.model_config
        text = config.hf_text_config
        drafter = {
            "path": self.server_args.speculative_draft_model_path,
            "block_size": self.gamma,
            "num_hidden_layers": text.num_hidden_layers,
            "target_layer_ids": list(getattr(text, "target_layer_ids", None) or ()),
            "markov_head_type": type(self.draft_model.markov_head).__name__,
            "markov_rank": int(getattr(text, "markov_rank", 0)),
            "confidence_head": self.settled.has_confidence_head,
            "vocab_size": config.vocab_size,
        }
        captured = self.target_worker.model_runner.decode_cuda_graph_runner is not None
        return DecodeInfo(self.settled.reason, self.gamma, cuda_graphs=captured, drafter=drafter)


@dataclass
class ScheduledResult(DSparkBatchResult):
    """Carry the outcome of a step to the host: tokens, the record's tensors, and lengths with the bonus token."""

    def copy_to_cpu(self, *args: object, **kwargs: object) -> None:
        """Start the copies. With grammars SGLang reads tokens and lengths before it processes a result."""
        super().copy_to_cpu(*args, **kwargs)
        assert self._copied is not None, "every step packs its tokens"
        self.next_token_ids, *_, self.accept_lens = self._copied.read()

    def unpack(self, record: StepRecord, tensors: Sequence[torch.Tensor]) -> None:
        self.next_token_ids, *rest, self.accept_lens = tensors
        self.record = record.of(rest)
        carry_counts(self, self.record.verify_lens, record.drafted)


class MeasuredSteps:
    """Steps of greedy requests that do not exist, in the two parts that a table has times of."""

    def __init__(self, worker: ScheduledWorker, dummy: DummyBatch) -> None:
        self._worker, self._dummy = worker, dummy
        self._tokens = dummy.tokens(worker.gamma + 1)[:, 1:].contiguous()
        # Served steps have no lengths on the host then, and with them the worker would wait for the device.
        self._lengths_on_device = worker.overlaps and not worker.model_runner.attn_backend.needs_cpu_seq_lens

    def draft(self, depth: int) -> None:
        """Draft whole blocks: the worker knows no shorter ones."""
        worker, batch = self._worker, self._dummy.fresh()
        worker.step = worker.whole_blocks(len(self._tokens))
        given: dict[str, Any] = {"batch": batch, "bs": len(self._tokens), "device": worker.device}
        window = alloc_verify_window(
            **given,
            verify_num_draft_tokens=worker.verify_num_draft_tokens,
            block_pos_offsets=worker._block_pos_offsets,
            model_runner=worker.model_runner,
            seq_lens_cpu=batch.seq_lens_cpu,
        )
        with worker._draft_context():
            worker._proposer.propose(
                **given,
                draft_input=batch.spec_info,
                verify_window=window,
                target_model=worker.model_runner.model,
                sampling_info=None,
            )

    def verify(self, drafts: int) -> None:
        """Plan, verify, accept and commit so many drafts per request."""
        decision = StepDecision(drafts, FixedLength(), with_confidence=False)
        self._worker.step = ScheduledStep(decision, len(self._tokens), self._worker.rows, self._tokens)
        batch: Any = self._dummy.fresh()
        batch.forward_iter = 0  # which the worker's own observers read
        if self._lengths_on_device:
            batch.seq_lens_cpu = batch.seq_lens_sum = None
        self._worker._forward_decode(batch, None)


@hook(
    "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker",
    HookType.AFTER,
    where="children",
    reason="SGLang chooses the class of a worker of its own; a scheduler process hears of its worker here first",
    by=Moment.SOME_TIME,  # called only in a scheduler
)
def choose_worker(chosen: type, algorithm: object, server_args: ServerArgs) -> type:
    """Have a scheduler make SGLang's own worker under our schedule, and hook what else it needs."""
    assert chosen is DSparkWorkerV2, "a server of this kind decodes with it"
    os.environ[MODE] = scheduled(server_args).mode
    hooks.install(server_args, "any_worker")
    return ScheduledWorker
