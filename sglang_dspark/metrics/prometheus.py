"""The statistics as Prometheus metrics, beside SGLang's own.

Counters are sums since the start, by load if the load matters; figures over any span follow from their rates. Gauges
are the figures of the last minute ready-made.

A step costs nothing here: a thread copies the sums once a second.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang_dspark.calibration.fit import Verdict
from sglang_dspark.fence import FAILURES
from sglang_dspark.metrics.counters import Counters
from sglang_dspark.metrics.history import History
from sglang_dspark.metrics.sums import MEASURED_MS, PREDICTED_MS, STEPS, TIMED_STEPS, Figures, Sums, requests_of

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

logger = logging.getLogger(__name__)

PREFIX = "sglang:dspark_"
PERIOD_S = 1.0

LOAD_COUNTERS = {
    "steps_total": "Decode steps.",
    "plain_steps_total": "Decode steps in which nothing was drafted.",
    "parked_steps_total": "Decode steps while speculation rested because plain steps are faster.",
    "request_steps_total": "Requests, summed over the decode steps.",
    "drafted_tokens_total": "Draft tokens that the drafter proposed, without copied ones.",
    "copied_tokens_total": "Draft tokens that presets copied; they count as verified and accepted, not as drafted.",
    "verified_tokens_total": "Draft tokens that went through the target.",
    "accepted_tokens_total": "Draft tokens that the target kept.",
    "wasted_tokens_total": "Draft tokens that were verified and not kept.",
    "committed_tokens_total": "Tokens gained: accepted drafts and one correction or bonus token per request and step.",
    "timed_steps_total": "Decode steps that were timed.",
    "step_seconds_measured_total": "Their time.",
    "step_seconds_predicted_total": "Predicted time of the timed decode steps; stays 0 without measured step times.",
}
"""By label ``load``: most requests of a step, a power of two."""
POSITION_COUNTERS = {
    "position_verified_total": "Draft tokens that went through the target.",
    "position_tested_total": "Verified draft tokens whose predecessors in the block were all kept.",
    "position_accepted_total": "Draft tokens that the target kept.",
    "position_predicted_total": "Verified draft tokens whose survival was predicted.",
    "position_predicted_survival_total": "The sum of these predictions.",
    "position_predicted_survivors_total": "Draft tokens with a predicted survival that survived.",
}
"""By label ``position``: index in the block, 0 first."""
ADVICE_COUNTERS = {"failed_advice_total": "Failed calls of functions that only advise; the requests went on without."}
"""By label ``advice``."""
POLICY_COUNTERS = {"policy_steps_total": "Decode steps chosen by the policy."}
GAUGES = {
    "tokens_per_second": "Tokens committed per second, last minute.",
    "accept_length": "Tokens committed per request and step, bonus token included, last minute.",
    "occupancy": "Requests per decode step as a share of those that may run, last minute.",
    "parked": "1 while speculation rests because plain steps are faster.",
    "drafter_misfit": "1 if the drafter's first drafts say that it does not fit the target, NaN before they can.",
}


class State(NamedTuple):
    """Say whether speculation rests at the moment, and whether the drafter fits."""

    parked: bool
    fit: Verdict = Verdict.UNKNOWN


class Metrics:
    """Keeps Prometheus metrics equal to the counters.

    Args:
        counters, history: what is exported.
        state: of the server; called from another thread.
        max_running_requests: requests that a step may have.
        labels: on every metric.
        registry: of prometheus_client; None means its default one, which SGLang exports from all its processes.
    """

    def __init__(
        self,
        counters: Counters,
        history: History,
        state: Callable[[], State],
        max_running_requests: int,
        labels: Mapping[str, Any],
        registry: CollectorRegistry | None = None,
    ) -> None:
        # Not before SGLang has said in the environment where its processes meet.
        import prometheus_client

        self._counters, self._history, self._state = counters, history, state
        self._max_running_requests = max_running_requests
        self._labels = dict(labels)
        self._exported: dict[tuple[str, ...], float] = {}
        registry = prometheus_client.REGISTRY if registry is None else registry
        self._families: dict[str, Any] = {}
        counted = {
            "load": LOAD_COUNTERS,
            "position": POSITION_COUNTERS,
            "policy": POLICY_COUNTERS,
            "advice": ADVICE_COUNTERS,
        }
        for label, described in counted.items():
            for name, text in described.items():
                names = [*self._labels, label]
                self._families[name] = prometheus_client.Counter(PREFIX + name, text, names, registry=registry)
        for name, text in GAUGES.items():
            self._families[name] = prometheus_client.Gauge(
                PREFIX + name, text, list(self._labels), registry=registry, multiprocess_mode="mostrecent"
            )

    def start(self) -> None:
        """Update now and once a second, until the process ends."""
        self.update()
        threading.Thread(target=self._run, name="dspark-metrics", daemon=True).start()

    def _run(self) -> None:
        waiting = threading.Event()
        fails = False
        while not waiting.wait(PERIOD_S):
            try:
                self.update()
            except (OSError, ValueError) as error:  # a full disk: metrics of several processes are files
                if not fails:
                    logger.warning("DSPARK: metrics cannot be updated, which is tried again every second: %r", error)
                fails = True
            else:
                fails = False

    def update(self) -> None:
        """Bring all metrics up to date."""
        for name, value, label in self._counts(self._counters.sums()):
            series = name, *label.values()
            self._families[name].labels(**self._labels, **label).inc(max(0.0, value - self._exported.get(series, 0.0)))
            self._exported[series] = value
        for name, gauge in self._levels():
            # NaN: nothing to be said, a gap in a graph.
            self._families[name].labels(**self._labels).set(float("nan") if gauge is None else gauge)

    def _counts(self, sums: Sums) -> Iterator[tuple[str, float, dict[str, str]]]:
        for load, row in enumerate(sums.loads):
            if row[STEPS] or row[TIMED_STEPS]:
                figures, label = Figures(row), {"load": str(requests_of(load)[1])}
                for key, value in figures.counts().items():
                    name = {"rounds": "request_steps"}.get(key, key) + "_total"
                    if name in LOAD_COUNTERS:
                        yield name, value, label
                yield "timed_steps_total", row[TIMED_STEPS], label
                yield "step_seconds_measured_total", row[MEASURED_MS] / 1e3, label
                yield "step_seconds_predicted_total", row[PREDICTED_MS] / 1e3, label
        columns = [*sums.total().positions(), *sums.predicted]
        for name, values in zip(POSITION_COUNTERS, columns, strict=True):
            for position, value in enumerate(values.tolist()):
                yield name, value, {"position": str(position)}
        for policy, steps in list(self._counters.steps_by_policy.items()):
            yield "policy_steps_total", steps, {"policy": policy}
        for advice, failures in list(FAILURES.items()):
            yield "failed_advice_total", failures, {"advice": advice}

    def _levels(self) -> Iterator[tuple[str, float | None]]:
        recent, state = self._history.snapshot().recent_report(), self._state()
        running = recent["running_requests"]
        levels = recent | {
            "tokens_per_second": recent["tokens_per_s"],
            "occupancy": None if running is None else running / self._max_running_requests,
            "parked": float(state.parked),
            "drafter_misfit": None if state.fit is Verdict.UNKNOWN else float(state.fit is Verdict.MISFIT),
        }
        return ((name, levels[name]) for name in GAUGES)
