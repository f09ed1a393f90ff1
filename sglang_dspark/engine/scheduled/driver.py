"""Drives SGLang's own DSPARK worker by our schedule, and learns from its outcomes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.runtime_context import get_parallel

from sglang_dspark.calibration.online import OnlineCalibration
from sglang_dspark.config import DSparkConfig
from sglang_dspark.engine.compat.arguments import attached
from sglang_dspark.engine.scheduled.captured_rows import CapturedRows
from sglang_dspark.engine.scheduled.step import ScheduledStep
from sglang_dspark.engine.scheduler.agreement import Agreement
from sglang_dspark.engine.scheduler.batch import is_running, record_traces
from sglang_dspark.engine.scheduler.cached_by_batch import CachedByBatch
from sglang_dspark.engine.scheduler.capabilities import Decoding, capabilities, in_one_line
from sglang_dspark.engine.scheduler.draft_input import kv_lengths
from sglang_dspark.engine.scheduler.request_options import BatchOptions
from sglang_dspark.metrics.reporting import Reporting
from sglang_dspark.scheduling.schedule import Schedule
from sglang_dspark.scheduling.sps_table import SpsTable
from sglang_dspark.step.decision import StepDecision
from sglang_dspark.step.device_time import DeviceTimer
from sglang_dspark.step.record import StepRecord
from sglang_dspark.step.selection import FixedLength

logger = logging.getLogger(__name__)


class ScheduledWorker:
    """The steps of SGLang's own worker under our schedule.

    The worker drafts whole blocks or nothing, and verifies as many drafts of every request as it is told. That follows
    from outcomes of earlier steps and from confidences that do not know the draft in question, as with our own worker,
    so the texts stay the target's.

    Args:
        worker: SGLang's ``DSparkWorkerV2``, ready to serve.
    """

    def __init__(self, worker: Any) -> None:
        self.worker, self.target_worker = worker, worker.target_worker
        self.server_args = resolving_view(worker.server_args)
        self.options: DSparkConfig = attached(worker.server_args).config
        self.device, self.gamma = torch.device(worker.device), int(worker.gamma)
        self.agreement = Agreement(get_parallel().tp_group)
        if not self.agreement.leads:
            logging.getLogger("sglang_dspark").setLevel(logging.WARNING)
        runner = self.target_worker.model_runner
        self.rows = CapturedRows.of(runner, self.gamma + 1)
        lag = int(self.device.type == "cuda" and not self.server_args.disable_overlap_schedule)
        calibration = OnlineCalibration.from_file(self.options.confidence_sts_path, self.gamma, self.gamma)
        self.schedule = Schedule(self.options, self.gamma, calibration, self.device, lag)
        self.reporting = Reporting(self.schedule, self.gamma, int(runner.max_running_requests))
        self._request_options = CachedByBatch(partial(BatchOptions.of, max_verify=self.gamma, device=self.device))
        self._timer = DeviceTimer(self.device)
        self._step, self._started = self.whole_blocks(0), False

    def start(self, table: SpsTable | None) -> None:
        """Let the configured policy decide from now on, by measured step times if it needs them."""
        self.schedule.start(table, fixed_draft_shape=True)
        self._started = True
        logger.info("DSPARK: %s", in_one_line(self.capabilities()))

    def whole_blocks(self, requests: int, context: float = 0.0) -> ScheduledStep:
        """Return a step that drafts and verifies all that it can, of texts of ``context`` tokens on average."""
        decision = StepDecision(self.gamma, FixedLength(), with_confidence=False, context=context)
        return ScheduledStep(decision, requests, self.rows)

    def run(self, decode: Callable[[], Any], batch: Any) -> Any:
        """Decide, run the worker's own step, and return its result with a record of what it did.

        Args:
            decode: the worker's step, which comes back here for its drafts and its rows.
            batch: SGLang's.
        """
        if not self._started:
            return decode()  # a step that is measured
        reqs = batch.reqs
        options = self._request_options.read(reqs)
        self._step = step = self._chosen(batch, options)
        span = self._timer.begin()
        result = decode()
        # Views of a graph's buffers, which the next step overwrites: our copies to the host come before these.
        result.accept_lens, result.next_token_ids = result.accept_lens.clone(), result.next_token_ids.clone()
        self.schedule.end_step(step.decision, len(reqs), step.num_rows)
        result.dspark_record, result.dspark_span = self._record(batch, options, step), span
        span.end()
        return result

    def _chosen(self, batch: Any, options: BatchOptions) -> ScheduledStep:
        reqs = batch.reqs
        context = sum(kv_lengths(reqs)[0]) / len(reqs)
        rids = [req.rid for req in reqs]
        # A grammar has made the host wait for the step before.
        awaited = self.device.type == "cuda" and bool(batch.has_grammar)
        decision = self.schedule.choose(rids, context, options.limits, traced=options.traced, awaited=awaited)
        self.reporting.record_time()
        decision = self.agreement.share(decision)
        if not self.rows.fit(len(reqs)):
            return self.whole_blocks(len(reqs), context)
        return ScheduledStep(decision, len(reqs), self.rows)

    def set_step(self, step: ScheduledStep) -> None:
        """Have the worker run this step next, to measure it."""
        self._step = step

    def propose(self, draft: Callable[[], Any], anchors: torch.Tensor, sampling: Any) -> Any:
        """Return the proposal of the step under way, see :meth:`ScheduledStep.propose`."""
        return self._step.propose(draft, anchors, sampling)

    def lay_out(self) -> Any:
        """Return the rows that the step under way verifies, see :meth:`ScheduledStep.lay_out`."""
        return self._step.lay_out(self.schedule.forecast, self.agreement)

    def _record(self, batch: Any, options: BatchOptions, step: ScheduledStep) -> StepRecord:
        assert step.verify_lens is not None, "every step verifies"
        reqs, traced = batch.reqs, None
        if options.traced:
            traced = torch.cat([batch.seq_lens.to(torch.int64)[:, None], step.block], dim=1)
        return StepRecord(
            requests=[req.rid for req in reqs],
            decision=step.decision,
            drafted=step.decision.draft_lens(len(reqs)),
            verify_lens=step.verify_lens,
            confidence=step.confidence,
            traced=traced,
            copied=[0] * len(reqs),
            policy=self.schedule.policy.name,
            parked=self.schedule.parked,
        )

    def observe(self, result: Any, reqs: Sequence[Any]) -> None:
        """Learn from a result whose tensors have reached the host.

        Args:
            reqs: of its step, whose tokens SGLang has taken.
        """
        record: StepRecord = result.dspark_record
        span, copied = result.dspark_span, result.copy_done
        if span.ms is not None:
            self.schedule.processed(span.ms, getattr(copied, "waited_ms", 0.0))
        committed = result.accept_lens.tolist()
        running = [index for index, req in enumerate(reqs) if is_running(req)]
        if running:
            accepted = [committed[index] - 1 for index in running]
            self.reporting.record(record, running, accepted)
            self.schedule.observe(record, running, accepted)
            self.reporting.log()
        record_traces(reqs, record, committed)

    def before_other_work(self) -> None:
        """Take note that what comes next is not a decode step."""
        self.schedule.invalidate()

    def report(self, history_s: int = 0) -> dict[str, Any]:
        """Return what ``GET /dspark/stats`` is made of."""
        return self.reporting.report(history_s)

    def export_metrics(self, labels: dict[str, Any]) -> None:
        """Keep Prometheus metrics up to date from now on, with these labels on all of them."""
        self.reporting.export_metrics(labels)

    def switch_policy(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Verify by another policy from the next step on; return the JSON answer of ``POST /dspark/policy``.

        Raises:
            ConfigError: this server cannot run the policy.
        """
        return self.reporting.switch_policy(fields)

    def capabilities(self) -> dict[str, Any]:
        """Return the JSON of ``GET /dspark/capabilities``."""
        config, worker = self.worker.draft_model_runner.model_config, self.worker
        text, head = config.hf_text_config, worker.draft_model.markov_head
        drafter = {
            "path": self.server_args.speculative_draft_model_path,
            "block_size": self.gamma,
            "num_hidden_layers": text.num_hidden_layers,
            "target_layer_ids": list(getattr(text, "target_layer_ids", None) or ()),
            "markov_head_type": type(head).__name__,
            "markov_rank": int(getattr(text, "markov_rank", 0)),
            "confidence_head": True,
            "vocab_size": config.vocab_size,
        }
        decoding = Decoding(
            "SGLang's own worker drafts and verifies, by the schedule of sglang-dspark",
            self.gamma,
            cuda_graphs=bool(self.rows.tiers),
            presets=False,
        )
        return capabilities(self.server_args, self.target_worker.model_runner, self.schedule, drafter, decoding)
