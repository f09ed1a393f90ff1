"""Drives the steps of SGLang's own worker by our schedule, and learns from their outcomes."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.dspark_components.dspark_planner import alloc_verify_window

from sglang_dspark.engine import hooks
from sglang_dspark.engine.agreement import Agreement
from sglang_dspark.engine.batch import CachedByBatch, most_words
from sglang_dspark.engine.hooks import Moment, check_called, hook
from sglang_dspark.engine.measure_steps import DummyBatch, Stepper, load_or_measure, table_key
from sglang_dspark.engine.part import parts_of
from sglang_dspark.engine.request_options import BatchOptions, carry_counts
from sglang_dspark.engine.scheduler import DecodeInfo, attach_driver, attached_driver
from sglang_dspark.engine.sglang_types import Req, ScheduleBatch, ServerArgs
from sglang_dspark.engine.step_control import StepControl
from sglang_dspark.features.builtin_worker import MODE, scheduled
from sglang_dspark.features.builtin_worker.step import Rows, ScheduledStep
from sglang_dspark.gpu_paths import is_on
from sglang_dspark.scheduling.online_calibration import OnlineCalibration
from sglang_dspark.scheduling.schedule import Schedule
from sglang_dspark.scheduling.sps_table import SpsTable
from sglang_dspark.step.decision import StepDecision, StepRecord
from sglang_dspark.step.packed import AwaitedEvent, DeviceTimer, PackedCopies
from sglang_dspark.step.selection import FixedLength

if TYPE_CHECKING:
    from sglang.srt.speculative.dspark_components.dspark_worker_v2 import DSparkWorkerV2


class ScheduledWorker:
    """The steps of SGLang's own worker under our schedule.

    The worker drafts whole blocks or nothing, and verifies as many drafts of each request as it is told. That follows
    from outcomes of earlier steps and from confidences that do not know the draft in question, as with our own worker,
    so the texts stay the target's.

    Args:
        worker: SGLang's ``DSparkWorkerV2``, ready to serve.

    Attributes:
        step: under way, or the one to be measured.
    """

    drafter = None

    def __init__(self, worker: DSparkWorkerV2) -> None:
        self.worker, self.target_worker = worker, worker.target_worker
        self.server_args = resolving_view(worker.server_args)
        self.settled = scheduled(worker.server_args)
        self.options = self.settled.config
        self.device, self.gamma = torch.device(worker.device), int(worker.gamma)
        self.agreement = Agreement(get_parallel().tp_group)
        if not self.agreement.leads:
            logging.getLogger("sglang_dspark").setLevel(logging.WARNING)
        runner = self.target_worker.model_runner
        by_request, graphs = self.settled.by_request, runner.decode_cuda_graph_runner
        tiers = tuple(graphs.capture_num_tokens) if by_request and graphs is not None else ()
        self.rows = Rows(self.gamma + 1, by_request, tiers)
        lag = int(self.device.type == "cuda" and not self.server_args.disable_overlap_schedule)
        calibration = None
        if self.settled.has_confidence_head:
            calibration = OnlineCalibration.from_file(self.options.confidence_sts_path, self.gamma, self.gamma)
        self.schedule = Schedule(self.options, self.gamma, calibration, self.device, lag)
        on_gpu = self.device.type == "cuda"
        self.schedule.forecast.in_one_launch = is_on("survivals", self.options.unproven, on_gpu=on_gpu)
        self.parts = parts_of(self, worker.server_args, ours=False)
        self.control = StepControl(self.schedule, self.agreement, self.parts, on_gpu)
        self._request_options = CachedByBatch(partial(BatchOptions.of, max_verify=self.gamma))
        self._timer = DeviceTimer(self.device)
        self._copies = PackedCopies(most_words(int(runner.req_to_token_pool.size), self.gamma, self.gamma), self.device)
        self.step, self._started = self.whole_blocks(0), False

    def start(self) -> None:
        """Let the configured policy decide from now on, by measured step times if it needs them."""
        self.schedule.start(self._step_times(), fixed_draft_shape=True, uniform=not self.rows.by_request)
        self._started = True
        for part in self.parts:
            part.ready()

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

    def run(self, decode: Callable[[], Any], batch: ScheduleBatch) -> Any:
        """Decide, run the worker's own step, which comes back here for drafts and rows, and return its result."""
        if not self._started:  # a step that is measured
            return decode()
        reqs = batch.reqs
        options = self._request_options.read(reqs)
        decision = self.control.choose(batch, options)
        fits = self.rows.fit(len(reqs))
        step = ScheduledStep(decision, len(reqs), self.rows) if fits else self.whole_blocks(len(reqs), decision.context)
        self.step, span = step, self._timer.begin()
        result = decode()
        self.schedule.end_step(step.decision, len(reqs), step.num_rows)
        result.dspark_record = record = self._record(batch, options, step)
        # Views of a graph's buffers, which the next step overwrites. The longest types come first.
        result.dspark_copy = self._copies.pack([result.next_token_ids, *record.tensors, result.accept_lens])
        # SGLang would copy both; the record has what they say.
        result.cap_lens = result.block_accept_lens = None
        result.dspark_span = span
        span.end()
        return result

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

    def observe(self, result: Any, reqs: Sequence[Req]) -> None:
        """Learn from a result whose tensors have reached the host; SGLang has taken its tokens."""
        device_ms, waited_ms = result.dspark_span.ms, getattr(result.copy_done, "waited_ms", 0.0)
        times_ms = None if device_ms is None else (device_ms, waited_ms)
        self.control.observe(reqs, result.dspark_record, result.accept_lens.tolist(), times_ms)

    def weights_changed(self, *, new_drafter: bool = False) -> None:
        """Forget what was learned of the weights before; SGLang's drafter shares layers with the target."""
        self.control.forget(new_drafter=new_drafter)

    def decoding(self) -> DecodeInfo:
        """Return how the server decodes."""
        config = self.worker.draft_model_runner.model_config
        text = config.hf_text_config
        drafter = {
            "path": self.server_args.speculative_draft_model_path,
            "block_size": self.gamma,
            "num_hidden_layers": text.num_hidden_layers,
            "target_layer_ids": list(getattr(text, "target_layer_ids", None) or ()),
            "markov_head_type": type(self.worker.draft_model.markov_head).__name__,
            "markov_rank": int(getattr(text, "markov_rank", 0)),
            "confidence_head": self.settled.has_confidence_head,
            "vocab_size": config.vocab_size,
        }
        captured = self.target_worker.model_runner.decode_cuda_graph_runner is not None
        return DecodeInfo(self.settled.reason, self.gamma, cuda_graphs=captured, drafter=drafter)


class MeasuredSteps:
    """Steps of greedy requests that do not exist, in the two parts that a table has times of."""

    def __init__(self, driver: ScheduledWorker, dummy: DummyBatch) -> None:
        self._driver, self._dummy = driver, dummy
        self._tokens = dummy.tokens(driver.gamma + 1)[:, 1:].contiguous()
        # Served steps have no lengths on the host then, and with them the worker would wait for the device.
        overlaps = driver.device.type == "cuda" and not driver.server_args.disable_overlap_schedule
        self._lengths_on_device = overlaps and not driver.worker.model_runner.attn_backend.needs_cpu_seq_lens

    def draft(self, depth: int) -> None:
        """Draft whole blocks: the worker knows no shorter ones."""
        worker, batch = self._driver.worker, self._dummy.fresh()
        self._driver.step = self._driver.whole_blocks(len(self._tokens))
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
        self._driver.step = ScheduledStep(decision, len(self._tokens), self._driver.rows, self._tokens)
        batch: Any = self._dummy.fresh()
        batch.forward_iter = 0  # which the worker's own observers read
        if self._lengths_on_device:
            batch.seq_lens_cpu = batch.seq_lens_sum = None
        self._driver.worker._forward_decode(batch, None)


# The handlers of hooks.


@hook(
    "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker",
    HookType.BEFORE,
    where="children",
    reason="a scheduler process hears of its worker here first",
    by=Moment.SOME_TIME,  # called only in a scheduler
)
def install_hooks(algorithm: object, server_args: ServerArgs) -> None:
    """Hook SGLang's own worker, in the scheduler that is about to make it."""
    os.environ[MODE] = scheduled(server_args).mode
    hooks.install(server_args, "any_worker")


def driver_of(part: object) -> ScheduledWorker:
    """Return what drives SGLang's own worker, of the worker or of a part of it that is hooked."""
    driver = attached_driver(part)
    assert isinstance(driver, ScheduledWorker), "SGLang's own worker is not driven yet"
    return driver


@hook(
    "sglang.srt.speculative.dspark_components.dspark_worker_v2.DSparkWorkerV2.init_cuda_graphs",
    HookType.AFTER,
    where="any_worker",
    reason="step times are measured on the worker's own steps, when its graphs are captured",
)
def start(result: None, worker: DSparkWorkerV2) -> None:
    """Take over the worker's steps, once it is ready to serve."""
    with torch.no_grad():
        driver = ScheduledWorker(worker)
        attach_driver(driver, worker, worker._proposer, worker._verify_planner)
        driver.start()
    check_called(Moment.READY)


@hook(
    "sglang.srt.speculative.dspark_components.dspark_worker_v2.DSparkWorkerV2._forward_decode",
    HookType.AROUND,
    where="any_worker",
    reason="the schedule decides a step before anything of it is drafted, and notes what it did",
)
def decode(
    original: Callable[..., Any], worker: DSparkWorkerV2, batch: ScheduleBatch, *args: object, **kwargs: object
) -> Any:
    """Run a decode step as the schedule decides."""
    step = partial(original, worker, batch, *args, **kwargs)
    return step() if batch.forward_mode.is_idle() else driver_of(worker).run(step, batch)


@hook(
    "sglang.srt.speculative.dspark_components.dspark_worker_v2.DSparkWorkerV2._forward_prefill",
    HookType.BEFORE,
    where="any_worker",
    reason="the time between two steps is not a step's if a prefill lies between them",
)
def before_prefill(worker: DSparkWorkerV2, *args: object, **kwargs: object) -> None:
    """Take note that what comes next is not a decode step."""
    driver_of(worker).schedule.invalidate()


@hook(
    "sglang.srt.speculative.dspark_components.dspark_draft.DraftBlockProposer.propose",
    HookType.AROUND,
    where="any_worker",
    reason="SGLang's own worker drafts in every step; its planner reads confidences that the schedule replaces",
)
def propose(
    original: Callable[..., Any], proposer: Any, *, draft_input: Any, sampling_info: Any, **given: object
) -> Any:
    """Draft, or not."""
    draft = partial(original, proposer, draft_input=draft_input, sampling_info=sampling_info, **given)
    return driver_of(proposer).step.propose(draft, draft_input.bonus_tokens, sampling_info)


@hook(
    "sglang.srt.speculative.dspark_components.dspark_planner.DSparkVerifyPlanner.schedule_layout",
    HookType.REPLACE,
    where="any_worker",
    reason="the schedule decides how many drafts of each request are verified",
)
def lay_out(planner: Any, **given: object) -> Any:
    """Return how many rows of each request are verified."""
    driver = driver_of(planner)
    return driver.step.lay_out(driver.schedule.forecast, driver.agreement)


@hook(
    "sglang.srt.managers.utils.GenerationBatchResult.copy_to_cpu",
    HookType.AROUND,
    where="any_worker",
    reason="tokens, lengths and confidences of a step come to the host with one copy",
    by=Moment.SOME_TIME,  # under overlap
)
def copy_to_cpu(original: Callable[..., None], result: Any, *args: object, **kwargs: object) -> None:
    """Copy all of a step at once, before SGLang records the event that readers wait for."""
    pending = getattr(result, "dspark_copy", None)
    if pending is not None:
        # What is on the host already SGLang leaves alone.
        result.dspark_copy = copied = pending.copy()
        result.next_token_ids, *_, result.accept_lens = copied.read()
    original(result, *args, **kwargs)
    if pending is not None:
        result.copy_done = AwaitedEvent(result.copy_done)


@hook(
    "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor._resolve_spec_v2_tokens",
    HookType.AROUND,
    where="any_worker",
    reason="there the schedule learns what became of the drafts",
)
def observe(original: Callable[..., Any], processor: Any, result: Any, batch: ScheduleBatch) -> Any:
    """Count what was verified, and learn from what SGLang reads of a result."""
    check_called(Moment.ANSWERED)
    record = getattr(result, "dspark_record", None)
    if record is not None:
        _, *tensors, _ = result.dspark_copy.take()  # a later copy goes to the same place
        result.dspark_record = record = record.of(tensors)
        # The counts of answers come from these.
        carry_counts(result, record.verify_lens, record.drafted)
    predicted = original(processor, result, batch)
    if record is not None:
        driver_of(processor.model_worker).observe(result, batch.reqs)
    return predicted
