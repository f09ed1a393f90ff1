"""Reports of a running server: statistics, metrics and the log."""

from __future__ import annotations

import logging
import time
from typing import Any

from sglang_dspark.calibration.fit import Fit
from sglang_dspark.fence import FAILURES
from sglang_dspark.metrics.counters import Counters
from sglang_dspark.metrics.first_drafts import FirstDrafts
from sglang_dspark.metrics.history import History
from sglang_dspark.metrics.prometheus import Metrics, State
from sglang_dspark.scheduling.schedule import Schedule
from sglang_dspark.step.record import StepRecord

logger = logging.getLogger(__name__)

_LOG_INTERVAL_S = 30.0


class Reporting:
    """Counts what steps do, and reports it.

    Args:
        schedule: of the server.
        gamma: drafts of a block.
        max_running_requests: requests that a step may have.
    """

    def __init__(self, schedule: Schedule, gamma: int, max_running_requests: int) -> None:
        self._schedule, self._gamma, self._max_running_requests = schedule, gamma, max_running_requests
        self._counters = Counters(gamma, schedule.forecast.predicted)
        self._first_drafts = FirstDrafts()
        self._history = History(self._counters)
        self._logged_at = time.monotonic()
        self._warned = False

    def record_time(self) -> None:
        """Count the time of the step behind, if it was taken."""
        if (timed := self._schedule.last_time) is not None:
            self._counters.record_time(timed.requests, timed.measured_ms, timed.expected_ms)

    def record(self, rounds: StepRecord, running: list[int], accept_lens: list[int]) -> None:
        """Count a step, whose tensors are on the host.

        Args:
            running: requests of the step that it was meant for.
            accept_lens: drafts accepted, of these.
        """
        self._history.tick()
        self._first_drafts.record(rounds, running, accept_lens)
        self._counters.record(
            [rounds.drawn[request] for request in running],
            [rounds.verified[request] for request in running],
            accept_lens,
            policy=rounds.policy,
            parked=rounds.parked,
            copied_lens=[rounds.copied[request] for request in running],
            followed_lens=[rounds.followed[request] for request in running],
            cached_lens=[rounds.cached[request] for request in running],
        )

    def log(self) -> None:
        """Write a line now and then, and once that a drafter does not fit its target."""
        if not self._warned and (warning := self.fit.warning) is not None:
            self._warned = True
            logger.warning("DSPARK: %s", warning)
        now = time.monotonic()
        if now - self._logged_at >= _LOG_INTERVAL_S:
            self._logged_at = now
            logger.info("DSPARK: %s", self._counters)

    @property
    def fit(self) -> Fit:
        """Return whether the drafter fits, as far as its first drafts say."""
        return self._first_drafts.fit

    def report(self, history_s: int = 0) -> dict[str, Any]:
        """Return the parts of ``GET /dspark/stats``, see ``full_report``; ``history_s``: seconds to list one by one."""
        known: dict[str, Any] = {"block_size": self._gamma, "max_running_requests": self._max_running_requests}
        known["drafter_fit"] = self.fit.report()
        known["failed_advice"] = dict(FAILURES)
        # The schedule first: it learns from what it has only noted so far.
        known |= self._schedule.report()
        return {"known": known, "snapshot": self._history.snapshot(history_s).packed()}

    def export_metrics(self, labels: dict[str, Any]) -> None:
        """Keep Prometheus metrics up to date from now on, with these labels on all of them."""
        Metrics(self._counters, self._history, self._state, self._max_running_requests, labels).start()

    def switch_policy(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Verify by another policy from the next step on; return the JSON answer of ``POST /dspark/policy``.

        Raises:
            ConfigError: this server cannot run the policy.
        """
        self._schedule.switch(fields)
        policy = self._schedule.policy
        logger.info("DSPARK: policy %s from now on", policy.name)
        until_now = {"uptime_s": self._history.uptime_s, **self._counters.sums().total().counts()}
        return {"policy": policy.name, "schedule": policy.report(), "until_now": until_now}

    def _state(self) -> State:
        return State(self._schedule.parked, self.fit.verdict)
