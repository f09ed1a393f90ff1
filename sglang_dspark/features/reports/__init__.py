"""Reports of a server: statistics, metrics, the live page, the counts of every answer; and the policy switch.

This module is the part of the scheduler: it counts steps by ``counters.py``, and answers what ``routes.py`` asks in the
HTTP process. ``prometheus.py`` exports the counts. ``traces.py`` tells every answer what became of its drafts.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.runtime_context import get_parallel, get_serving

from sglang_dspark.declared import Scalar
from sglang_dspark.engine.feature import Feature
from sglang_dspark.engine.hooks import Moment, hook
from sglang_dspark.engine.part import Counted, Part, part_of
from sglang_dspark.engine.scheduler import StepDriver, driver_of
from sglang_dspark.engine.server import tokens_per_step
from sglang_dspark.engine.sglang_types import Req
from sglang_dspark.errors import FAILURES, ConfigError, best_effort, nothing
from sglang_dspark.features.reports.counters import Counters, VersionKey, Versions
from sglang_dspark.features.reports.prometheus import Metrics
from sglang_dspark.features.reports.routes import (
    ANSWER_KEY,
    REPLICA,
    Json,
    StatsAnswer,
    add_routes,
    capabilities,
    in_one_line,
)
from sglang_dspark.features.reports.traces import trace_step
from sglang_dspark.step.decision import StepRecord

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import GetInternalStateReq, GetInternalStateReqOutput
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.metrics_reporter import SchedulerMetricsReporter


logger = logging.getLogger(__name__)


class Reports(Part):
    """Counts what steps do, and reports it.

    Args:
        driver: of the steps.
    """

    _counters: Counters
    _versions: Versions

    def __init__(self, driver: StepDriver) -> None:
        self._driver, self._start = driver, time.monotonic()
        self._taking: list[tuple[Req, int]] = []  # requests of the last step, and how many tokens they had before it

    def ready(self) -> None:
        """Begin to count, and say in the log how the server decodes."""
        decoding = self._driver.decoding()
        self._proposed = decoding.proposed
        self._counters = Counters(decoding.gamma, self._driver.schedule.forecast.predicted)
        self._versions = Versions(self._version())
        logger.info("DSPARK: %s", in_one_line(capabilities(self._driver)))

    def _version(self) -> VersionKey:
        drafter = self._driver.decoding().drafter
        return str(get_serving().weight_version), "" if drafter is None else drafter["path"]

    def weights_changed(self) -> None:
        """Count for the new version, and judge again whether the drafter fits."""
        self._versions.change(self._version())

    def _follow_name(self) -> None:
        """Count for another version if that is what the operator has called the weights."""
        named, _ = self._versions.counts[-1]["key"]
        if str(get_serving().weight_version) != named:
            self.weights_changed()

    def step_done(
        self, reqs: Sequence[Req], record: StepRecord, running: Sequence[int], accepted: Sequence[int]
    ) -> None:
        self._taking = [(reqs[request], len(reqs[request].output_ids)) for request in running]
        self._count(reqs, record, running, accepted)
        trace_step(reqs, record, running, accepted)

    @best_effort("statistics of steps", instead=nothing)
    def _count(self, reqs: Sequence[Req], record: StepRecord, running: Sequence[int], accepted: Sequence[int]) -> None:
        if record.behind is not None:
            self._counters.record_time(record.behind)
        if not running:
            return
        self._follow_name()
        self._versions.count(record, running, accepted)
        lens = [record.from_drafter, record.verified]
        if record.has_chain:
            lens += [record.from_request, record.from_text, record.from_cache]
        if len(running) < len(record.requests):
            lens = [[of[request] for request in running] for of in lens]
        drawn, verified, *leading = lens
        # By SGLang's own count of the tokens of thoughts.
        thoughts = [
            kept
            for req, kept in zip([reqs[request] for request in running], accepted, strict=True)
            if not req._is_reasoning_over and (req.require_reasoning or req.reasoning_tokens > 0)
        ]
        unproposed = 0
        if self._proposed is not None and record.committed is not None:  # tokens that come with a prompt are no drafts
            unproposed = int((~self._proposed[record.committed.numpy()[list(running)]]).sum())
        self._counters.record(
            drawn,
            verified,
            accepted,
            leading,
            policy=record.policy,
            parked=record.parked,
            thoughts=thoughts,
            unproposed=unproposed,
        )

    def kept_tokens(self) -> int:
        """Return how many tokens of the last step its requests keep, now that SGLang has appended them.

        The end of an answer may lie before the step: a text that stops it may begin there.
        """
        ends = ((len(req.output_ids), req.finished_len, before) for req, before in self._taking)
        return sum(max(0, (now if end is None else min(now, end)) - before) for now, end, before in ends)

    def stats(self) -> StatsAnswer:
        """Return what ``GET /dspark/stats`` makes its figures of, as JSON."""
        self._follow_name()
        state = self._driver.schedule.report()  # the schedule first: it learns from what it has only noted so far
        for part in self._driver.parts:
            state |= part.report()
        return {
            "uptime_s": time.monotonic() - self._start,
            "state": state,
            "versions": self._versions.counts,
            "sums": self._counters.sums().lists(),
            "counted": {counted.name: dict(counted.values) for counted in self._counted_by_features()},
        }

    def _counted_by_features(self) -> list[Counted]:
        return [counted for part in self._driver.parts for counted in part.counted()]

    def counted(self) -> Sequence[Counted]:
        failed = "Failed calls of functions that only advise; the requests went on without them."
        return (
            Counted("steps_by_policy", self._counters.steps_by_policy),
            Counted("failed_advice", FAILURES, "advice", failed),
        )

    def switch_policy(self, fields: dict[str, Scalar]) -> Json:
        """Verify with another policy from the next step on; return what ``POST /dspark/policy`` answers, as JSON.

        Raises:
            ConfigError: this server cannot run the policy.
        """
        schedule = self._driver.schedule
        schedule.switch(fields)
        logger.info("DSPARK: policy %s from now on", schedule.policy.name)
        return {"policy": schedule.policy.name, "schedule": schedule.policy.report()}

    def export_metrics(self, labels: dict[str, str]) -> None:
        """Keep Prometheus metrics up to date from now on, with these labels on all of them."""
        Metrics(self._counters, self._versions, labels, self._counted_by_features).start()

    @best_effort("answers to questions", instead=lambda reports, question, fields: {"failed": question})
    def reply(self, question: str, fields: dict[str, Scalar]) -> dict[str, object]:
        """Return the answer to a question of :class:`~.routes.Channel`, or why it is refused."""
        answers: dict[str, Callable[[], Mapping[str, object]]] = {
            "stats": self.stats,
            "capabilities": partial(capabilities, self._driver),
            "policy": partial(self.switch_policy, fields),
        }
        try:
            return {"answer": answers[question]()}
        except ConfigError as error:
            return {"refusal": str(error)}


def reports_of(scheduler: Scheduler) -> Reports:
    """Return the reports of SGLang's scheduler."""
    reports = part_of(driver_of(scheduler).parts, Reports)
    assert reports is not None, "every server that decodes with DSPARK reports"
    return reports


@hook(
    "sglang.srt.managers.scheduler.Scheduler.get_internal_state",
    HookType.AROUND,
    where="any_worker",
    reason="the routes below /dspark reach the scheduler through SGLang's channel for looking at a running server",
    by=Moment.SOME_TIME,
)
def answer_question(
    original: Callable[..., GetInternalStateReqOutput], scheduler: Scheduler, recv_req: GetInternalStateReq
) -> GetInternalStateReqOutput:
    """Answer our questions at the scheduler's end of the channel; others go on to SGLang."""
    from sglang.srt.managers.io_struct import GetInternalStateReqOutput

    if recv_req.rid is None:
        return original(scheduler, recv_req)
    reply = reports_of(scheduler).reply(*json.loads(recv_req.rid))
    return GetInternalStateReqOutput(internal_state={ANSWER_KEY: reply, REPLICA: get_parallel().dp_rank or 0})


@hook(
    "sglang.srt.managers.scheduler.Scheduler.init_metrics_reporter",
    HookType.AFTER,
    where="any_worker",
    reason="our Prometheus metrics carry the labels of SGLang's, which are known from here on",
)
def export_metrics(result: None, scheduler: Scheduler, *args: object, **kwargs: object) -> None:
    """Add our Prometheus metrics to SGLang's."""
    context = scheduler.metrics_collector_context
    if context.current_scheduler_metrics_enabled:
        reports_of(scheduler).export_metrics(context.collector.labels)


@hook(
    "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter.report_decode_stats",
    HookType.AROUND,
    where="any_worker",
    reason="SGLang takes every draft for verified and every token for kept, in its log and its metrics",
    by=Moment.SOME_TIME,  # after the first result, and not worth the end of a server
)
def report_verified(
    original: Callable[..., None],
    reporter: SchedulerMetricsReporter,
    *args: object,
    num_generated_tokens: int = 0,
    **kwargs: object,
) -> None:
    """Have SGLang report the tokens that requests keep, and divide the accepted drafts by the verified ones.

    SGLang counts all tokens of a step as generated, those after the end of an answer too, and divides by all
    drafts of a block in every round. So the accepted ones are scaled while it does. It would also report drafts
    proposed as accepted lengths of blocks, so it is told of none.
    """
    kept = reports_of(reporter.scheduler).kept_tokens()
    reporter.num_generated_tokens += kept - num_generated_tokens
    accepted = reporter.spec_num_correct_drafts
    _scale_accepted(reporter)
    original(reporter, *args, num_generated_tokens=kept, **kwargs)
    if reporter.spec_num_forward_ct:  # it goes on adding
        reporter.spec_num_correct_drafts = accepted


@best_effort("shares of accepted drafts", instead=nothing)
def _scale_accepted(reporter: SchedulerMetricsReporter) -> None:
    reporter.spec_num_block_accept_tokens = 0  # see request_options.carry_counts
    accepted, rounds = reporter.spec_num_correct_drafts, reporter.spec_num_forward_ct
    verified = reporter.spec_num_cap_tokens - rounds
    if verified:
        reporter.spec_num_correct_drafts = accepted / verified * rounds * (tokens_per_step() - 1)


FEATURE = Feature(
    __name__,
    is_used=lambda args: True,
    part=Reports,
    of_any_worker=True,
    routes=add_routes,
)
