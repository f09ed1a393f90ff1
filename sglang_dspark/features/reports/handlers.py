"""Handle the hooks of the scheduler process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from sglang.srt.plugins.hook_registry import HookType

from sglang_dspark.declared import Scalar
from sglang_dspark.engine.carried import hide_drafted, question_of
from sglang_dspark.engine.hooks import Moment, hook
from sglang_dspark.engine.part import part_of
from sglang_dspark.engine.scheduler import decoder_of
from sglang_dspark.engine.server import tokens_per_step
from sglang_dspark.errors import ConfigError
from sglang_dspark.features.reports.channel import KEY, REPLICA
from sglang_dspark.features.reports.served import Reports
from sglang_dspark.fence import fenced, nothing

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import GetInternalStateReq, GetInternalStateReqOutput
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.metrics_reporter import SchedulerMetricsReporter


def reports_of(scheduler: Scheduler) -> Reports:
    """Return the reports of SGLang's scheduler."""
    reports = part_of(decoder_of(scheduler).parts, Reports)
    assert reports is not None, "every server that decodes with DSPARK reports"
    return reports


@hook(
    "sglang.srt.managers.scheduler.Scheduler.get_internal_state",
    HookType.AROUND,
    where="any_worker",
    reason="the routes below /dspark reach the scheduler through SGLang's channel for looking at a running server",
    by=Moment.SOME_TIME,
)
def answer(
    original: Callable[..., GetInternalStateReqOutput], scheduler: Scheduler, recv_req: GetInternalStateReq
) -> GetInternalStateReqOutput:
    """Answer our questions at the scheduler's end of the channel; others go on to SGLang."""
    from sglang.srt.managers.io_struct import GetInternalStateReqOutput
    from sglang.srt.runtime_context import get_parallel

    asked = question_of(recv_req.rid)
    if asked is None:
        return original(scheduler, recv_req)
    reply = _reply(reports_of(scheduler), *asked)
    return GetInternalStateReqOutput(internal_state={KEY: reply, REPLICA: get_parallel().dp_rank or 0})


@fenced("answers to questions", instead=lambda reports, question, fields: {"failed": question})
def _reply(reports: Reports, question: str, fields: dict[str, Scalar]) -> dict[str, object]:
    answers: dict[str, Callable[[], Mapping[str, object]]] = {
        "stats": reports.stats,
        "capabilities": reports.capabilities,
        "policy": partial(reports.switch_policy, fields),
    }
    try:
        return {"answer": answers[question]()}
    except ConfigError as error:
        return {"refusal": str(error)}


@hook(
    "sglang.srt.managers.scheduler.Scheduler.record_weight_version_change",
    HookType.AFTER,
    where="any_worker",
    reason="accept lengths are told apart by version of the weights",
    by=Moment.SOME_TIME,
)
def name_version(result: None, scheduler: Scheduler, *args: object, **kwargs: object) -> None:
    """Have steps count for what the operator calls the weights from now on."""
    reports_of(scheduler).version_named()


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
    reason="SGLang assumes that every draft is verified, and understates the acceptance in its log and its metrics",
    by=Moment.SOME_TIME,  # behind the first result, and not worth the end of a server
)
def report_verified(
    original: Callable[..., None], reporter: SchedulerMetricsReporter, *args: object, **kwargs: object
) -> None:
    """Have SGLang divide the accepted drafts by the verified ones, in its log and in ``sglang:spec_accept_rate``.

    It divides them by all drafts of a block in every round. So the accepted ones are scaled while it does. It would
    also report drafts proposed as accepted lengths of blocks, so it is told of none.
    """
    accepted = reporter.spec_num_correct_drafts
    _scale_accepted(reporter)
    original(reporter, *args, **kwargs)
    if reporter.spec_num_forward_ct:  # it goes on adding
        reporter.spec_num_correct_drafts = accepted


@fenced("shares of accepted drafts", instead=nothing)
def _scale_accepted(reporter: SchedulerMetricsReporter) -> None:
    hide_drafted(reporter)
    accepted, rounds = reporter.spec_num_correct_drafts, reporter.spec_num_forward_ct
    verified = reporter.spec_num_cap_tokens - rounds
    if verified:
        reporter.spec_num_correct_drafts = accepted / verified * rounds * (tokens_per_step() - 1)
