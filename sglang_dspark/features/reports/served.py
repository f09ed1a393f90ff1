"""Reports of a scheduler: its statistics, its metrics, and what it writes into the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from sglang.srt.runtime_context import get_serving

from sglang_dspark.calibration.fit import Verdict
from sglang_dspark.declared import Scalar
from sglang_dspark.engine.part import Counted, Part
from sglang_dspark.engine.scheduler import Decoder
from sglang_dspark.engine.sglang_types import Req, ScheduleBatch
from sglang_dspark.features.reports.answers import Json, StatsAnswer, SwitchedAnswer
from sglang_dspark.features.reports.capabilities import capabilities, in_one_line
from sglang_dspark.features.reports.counters import Counters
from sglang_dspark.features.reports.coverage import Coverage
from sglang_dspark.features.reports.prometheus import Metrics
from sglang_dspark.features.reports.recent import Recent
from sglang_dspark.features.reports.spans import Spans
from sglang_dspark.features.reports.traces import trace
from sglang_dspark.features.reports.versions import Versions
from sglang_dspark.fence import FAILURES, fenced, nothing
from sglang_dspark.step.record import StepRecord

logger = logging.getLogger(__name__)

_LOG_INTERVAL_S = 30.0


class Reports(Part):
    """Counts what steps do, and reports it.

    Args:
        decoder: of the scheduler.
    """

    _counters: Counters
    _coverage: Coverage
    _recent: Recent
    _versions: Versions

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._spans = Spans()
        self._logged_at = time.monotonic()

    def ready(self) -> None:
        """Begin to count, and say in the log how the server decodes."""
        decoding = self._decoder.decoding()
        self._counters = Counters(decoding.gamma, self._decoder.schedule.forecast.predicted)
        self._coverage = Coverage(decoding.proposed)
        self._recent = Recent(self._counters)
        self._versions = Versions(self._version())
        logger.info("DSPARK: %s", in_one_line(self.capabilities()))

    def _version(self) -> tuple[str, str]:
        drafter = self._decoder.decoding().drafter
        return str(get_serving().weight_version), "" if drafter is None else drafter["path"]

    def weights_changed(self) -> None:
        """Count for the new version, and judge again whether the drafter fits."""
        self._spans.end(*self._in_force())
        self._versions.change(self._version())

    def version_named(self) -> None:
        """Count for another version if that is what the operator has called the weights."""
        if self._version() != self._versions.key:
            self.weights_changed()

    def _in_force(self) -> tuple[str, Verdict]:
        return self._versions.key[0], self._versions.first_drafts.fit.verdict

    def prefill_done(self, batch: ScheduleBatch) -> None:
        self._spans.begin(batch.reqs)

    def request_ended(self, req: Req) -> None:
        self._spans.end_request(req, *self._in_force())

    def step_done(
        self, reqs: Sequence[Req], record: StepRecord, running: Sequence[int], accepted: Sequence[int]
    ) -> None:
        self._count(reqs, record, running, accepted)
        trace(reqs, record, running, accepted)

    @fenced("statistics of steps", instead=nothing)
    def _count(self, reqs: Sequence[Req], record: StepRecord, running: Sequence[int], accepted: Sequence[int]) -> None:
        self._recent.tick()
        if record.behind is not None:
            self._counters.record_time(record.behind)
        if not running:
            return
        self._versions.count(record, running, accepted)
        lens = [record.drawn, record.verified]
        if record.has_chain:
            lens += [record.copied, record.followed, record.cached]
        if len(running) < len(record.requests):
            lens = [[of[request] for request in running] for of in lens]
        drawn, verified, *leading = lens
        self._counters.record(drawn, verified, accepted, *leading, policy=record.policy, parked=record.parked)
        # By SGLang's own count of the tokens of thoughts.
        thoughts = [
            kept
            for req, kept in zip([reqs[request] for request in running], accepted, strict=True)
            if not req._is_reasoning_over and (req.require_reasoning or req.reasoning_tokens > 0)
        ]
        unproposed = self._coverage.missing(record, running)
        self._counters.record_tokens(len(running), thoughts=thoughts, unproposed=unproposed)
        self._log()

    def _log(self) -> None:
        """Write a line now and then."""
        now = time.monotonic()
        if now - self._logged_at >= _LOG_INTERVAL_S:
            self._logged_at = now
            logger.info("DSPARK: %s", self._counters)

    def stats(self) -> StatsAnswer:
        """Return what ``GET /dspark/stats`` makes its figures of, as JSON."""
        state = self._decoder.schedule.report()  # the schedule first: it learns from what it has only noted so far
        for part in self._decoder.parts:
            state |= part.report()
        return {
            "uptime_s": self._recent.uptime_s,
            "state": state,
            "versions": self._versions.counts,
            "sums": self._counters.sums().lists(),
            "recent": self._recent.report(),
            "counted": {counted.name: dict(counted.values) for counted in self._counted_by_features()},
        }

    def _counted_by_features(self) -> list[Counted]:
        return [counted for part in self._decoder.parts for counted in part.counted()]

    def counted(self) -> Sequence[Counted]:
        failed = "Failed calls of functions that only advise; the requests went on without."
        return (
            Counted("steps_by_policy", "Decode steps.", "policy", self._counters.steps_by_policy),
            Counted("failed_advice", failed, "advice", FAILURES),
        )

    def capabilities(self) -> Json:
        """Return the JSON of ``GET /dspark/capabilities``."""
        return capabilities(self._decoder)

    def switch_policy(self, fields: dict[str, Scalar]) -> SwitchedAnswer:
        """Verify by another policy from the next step on; return what ``POST /dspark/policy`` answers, as JSON.

        Raises:
            ConfigError: this server cannot run the policy.
        """
        schedule = self._decoder.schedule
        schedule.switch(fields)
        logger.info("DSPARK: policy %s from now on", schedule.policy.name)
        until_now = {"uptime_s": self._recent.uptime_s, **self._counters.sums().total().counts()}
        state: Json = {"policy": schedule.policy.name, "schedule": schedule.policy.report()}
        return {"state": state, "until_now": until_now}

    def export_metrics(self, labels: dict[str, str]) -> None:
        """Keep Prometheus metrics up to date from now on, with these labels on all of them."""
        Metrics(self._counters, self._versions, labels, self._counted_by_features).start()
