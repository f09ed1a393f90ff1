"""Drives SGLang's own worker by our schedule, and learns from its outcomes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from dspark_kernels import StepRequests
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.runtime_context import get_parallel

from sglang_dspark.calibration.online import OnlineCalibration
from sglang_dspark.engine.agreement import Agreement
from sglang_dspark.engine.batch import CachedByBatch, most_words
from sglang_dspark.engine.part import parts_of
from sglang_dspark.engine.request_options import BatchOptions
from sglang_dspark.engine.scheduler import Decoding
from sglang_dspark.engine.sglang_types import Req, ScheduleBatch
from sglang_dspark.engine.step_control import StepControl
from sglang_dspark.features.own_worker.captured_rows import CapturedRows
from sglang_dspark.features.own_worker.lengths import has_narrow_rows
from sglang_dspark.features.own_worker.server import scheduled
from sglang_dspark.features.own_worker.step import Rows, ScheduledStep
from sglang_dspark.features.own_worker.widths import Widths
from sglang_dspark.scheduling.schedule import Schedule
from sglang_dspark.scheduling.sps_table import SpsTable
from sglang_dspark.step.decision import StepDecision
from sglang_dspark.step.device_time import DeviceTimer
from sglang_dspark.step.packed import PackedCopies
from sglang_dspark.step.record import StepRecord
from sglang_dspark.step.selection import FixedLength

if TYPE_CHECKING:
    from sglang.srt.speculative.dspark_components.dspark_worker_v2 import DSparkWorkerV2


class ScheduledWorker:
    """The steps of SGLang's own worker under our schedule.

    The worker drafts whole blocks or nothing, and verifies as many drafts as it is told, of each request or of all.
    That follows from outcomes of earlier steps and from confidences that do not know the draft in question, as with our
    own worker, so the texts stay the target's.

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
        self.rows = self._rows()
        lag = int(self.device.type == "cuda" and not self.server_args.disable_overlap_schedule)
        calibration = None
        if self.has_head:
            calibration = OnlineCalibration.from_file(self.options.confidence_sts_path, self.gamma, self.gamma)
        self.schedule = Schedule(self.options, self.gamma, calibration, self.device, lag)
        self.parts = parts_of(self, worker.server_args, ours=False)
        self.control = StepControl(self.schedule, self.agreement, self.parts, self.device.type == "cuda")
        self._request_options = CachedByBatch(partial(BatchOptions.of, max_verify=self.gamma))
        self._timer = DeviceTimer(self.device)
        most = int(self.target_worker.model_runner.req_to_token_pool.size)
        self._copies = PackedCopies(most_words(most, self.gamma, self.gamma), self.device)
        self.step, self._started = self.whole_blocks(0), False

    def _rows(self) -> Rows:
        if self.settled.by_request:
            return CapturedRows.of(self.target_worker.model_runner, self.gamma + 1)
        target = self.target_worker.model_runner.model_config
        return Widths(self.worker, self.agreement, narrow=has_narrow_rows(self.worker.server_args, target))

    @property
    def has_head(self) -> bool:
        """Return whether the worker has a confidence head; with one length for all it is not built."""
        return self.worker.draft_model.confidence_head is not None

    def start(self, table: SpsTable | None) -> None:
        """Let the configured policy decide from now on, by measured step times if it needs them."""
        self.schedule.start(table, fixed_draft_shape=True, lengths=self.rows.lengths)
        self._started = True
        for part in self.parts:
            part.ready()

    def whole_blocks(self, requests: int, context: float = 0.0) -> ScheduledStep:
        """Return a step that drafts and verifies all that it can, of texts of ``context`` tokens on average."""
        decision = StepDecision(self.gamma, FixedLength(), with_confidence=False, context=context)
        return ScheduledStep(decision, requests, self.rows)

    def run(self, decode: Callable[[], Any], batch: ScheduleBatch) -> Any:
        """Decide, run the worker's own step, which comes back here for drafts and rows, and return its result."""
        try:
            return self._run(decode, batch) if self._started else decode()  # a step that is measured
        finally:
            self.rows.release()

    def _run(self, decode: Callable[[], Any], batch: ScheduleBatch) -> Any:
        reqs = batch.reqs
        options = self._request_options.read(reqs)
        self.step = step = self._chosen(batch, options)
        span = self._timer.begin()
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

    def _chosen(self, batch: ScheduleBatch, options: BatchOptions) -> ScheduledStep:
        decision, requests = self.control.choose(batch, options), len(batch.reqs)
        if not self.rows.fit(requests):
            return self.whole_blocks(requests, decision.context)
        return ScheduledStep(decision, requests, self.rows)

    def lay_out(self, prefix_lens: torch.Tensor, req_pool_indices: torch.Tensor) -> Any:
        """Return the rows that the step under way verifies, see :meth:`ScheduledStep.lay_out`."""
        table = self.target_worker.model_runner.req_to_token_pool.req_to_token
        requests = StepRequests(self.step.anchors, prefix_lens, req_pool_indices, table)
        return self.step.lay_out(self.schedule.forecast, self.agreement, requests)

    def _record(self, batch: ScheduleBatch, options: BatchOptions, step: ScheduledStep) -> StepRecord:
        assert step.verify_lens is not None, "every step verifies"
        reqs, traced = batch.reqs, None
        if options.traced:
            traced = torch.cat([batch.seq_lens.to(torch.int64)[:, None], step.block], dim=1)
        return StepRecord(
            requests=options.ids,
            decision=step.decision,
            drafted=step.decision.draft_lens(len(reqs)),
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

    def decoding(self) -> Decoding:
        """Return how the server decodes."""
        config, worker = self.worker.draft_model_runner.model_config, self.worker
        text, head = config.hf_text_config, worker.draft_model.markov_head
        drafter = {
            "path": self.server_args.speculative_draft_model_path,
            "block_size": self.gamma,
            "num_hidden_layers": text.num_hidden_layers,
            "target_layer_ids": list(getattr(text, "target_layer_ids", None) or ()),
            "markov_head_type": type(head).__name__,
            "markov_rank": int(getattr(text, "markov_rank", 0)),
            "confidence_head": self.has_head,
            "vocab_size": config.vocab_size,
        }
        return Decoding(
            self.settled.reason,
            self.gamma,
            cuda_graphs=self.target_worker.model_runner.decode_cuda_graph_runner is not None,
            drafter=drafter,
        )
