"""Reports of a server: statistics, metrics, the live page, the counts of every answer; and the policy switch.

In the scheduler ``served.py`` counts steps, and answers what the routes ask through ``channel.py``. ``prometheus.py``
exports the counts. ``traces.py`` tells every answer what became of its drafts.
"""

from __future__ import annotations

from sglang.srt.plugins.hook_registry import HookType

from sglang_dspark.engine.feature import Feature
from sglang_dspark.engine.hook_checks import Moment
from sglang_dspark.engine.launch.hook import Hook

FEATURE = Feature(
    __name__,
    is_used=lambda args: True,
    hooks=(
        Hook(
            "sglang.srt.managers.tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics",
            HookType.AFTER,
            "features.reports.traces.count_drafts",
            "front_end",
            "SGLang assumes that every draft is verified, and understates the acceptance of requests",
        ),
        Hook(
            "sglang.srt.utils.auth.decide_request_auth",
            HookType.AFTER,
            "features.reports.routes.page_needs_no_key",
            "routes",
            "a browser has to load the page at /dspark before it can ask for the API key",
            Moment.SOME_TIME,
        ),
        Hook(
            "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter.report_decode_stats",
            HookType.AROUND,
            "features.reports.served.report_verified",
            "any_worker",
            "SGLang takes every draft for verified and every token for kept, in its log and its metrics",
            Moment.SOME_TIME,  # after the first result, and not worth the end of a server
        ),
        Hook(
            "sglang.srt.managers.scheduler.Scheduler.get_internal_state",
            HookType.AROUND,
            "features.reports.served.answer",
            "any_worker",
            "the routes below /dspark reach the scheduler through SGLang's channel for looking at a running server",
            Moment.SOME_TIME,
        ),
        Hook(
            "sglang.srt.managers.scheduler.Scheduler.record_weight_version_change",
            HookType.AFTER,
            "features.reports.served.name_version",
            "any_worker",
            "accept lengths are told apart by version of the weights",
            Moment.SOME_TIME,
        ),
        Hook(
            "sglang.srt.managers.scheduler.Scheduler.init_metrics_reporter",
            HookType.AFTER,
            "features.reports.served.export_metrics",
            "any_worker",
            "our Prometheus metrics carry the labels of SGLang's, which are known from here on",
        ),
    ),
    part="served.Reports",
    of_any_worker=True,
    routes="routes.add",
)
