"""The statistics as Prometheus metrics, next to SGLang's own: counters since the start, whose rates give all figures.

A step costs nothing here: a thread copies the sums once a second.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sglang_dspark.engine.part import Counted
from sglang_dspark.features.reports.counters import Counters, Sums, Versions, fit_of, requests_of
from sglang_dspark.scheduling.online_calibration import FitVerdict

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

logger = logging.getLogger(__name__)

PREFIX = "sglang:dspark_"
PERIOD_S = 1.0

LOAD_COUNTERS = {
    "steps_total": "Decode steps.",
    "plain_steps_total": "Decode steps in which nothing was drafted.",
    "parked_steps_total": "Decode steps while speculation rested because non-speculative steps are faster.",
    "request_steps_total": "Requests, summed over the decode steps.",
    "drafted_tokens_total": "Draft tokens that the drafter proposed, without copied ones.",
    "copied_tokens_total": "Draft tokens from texts that requests name; they count as verified and accepted only.",
    "verified_tokens_total": "Draft tokens that went through the target.",
    "accepted_tokens_total": "Draft tokens that the target kept.",
    "committed_tokens_total": "Tokens gained: accepted drafts and one correction or bonus token per request and step.",
    "timed_steps_total": "Decode steps that were timed.",
    "step_seconds_measured_total": "Their time.",
    "step_seconds_predicted_total": "Predicted time of the timed decode steps; stays 0 without measured step times.",
}
"""By label ``load``: most requests of a step, a power of two."""
POSITION_COUNTERS = {
    "position_verified_total": "Draft tokens that went through the target.",
    "position_accepted_total": "Draft tokens that the target kept.",
    "position_predicted_total": "Verified draft tokens whose survival was predicted.",
    "position_predicted_survival_total": "Sum of the predicted survivals of verified draft tokens.",
    "position_predicted_survivors_total": "Draft tokens with a predicted survival that survived.",
}
"""By label ``position``: index in the block, 0 first."""


class Metrics:
    """Keeps Prometheus metrics equal to the counters.

    Args:
        counters: what is exported.
        versions: whose last one says whether the drafter fits.
        labels: on every metric.
        counted: returns what features count, always of the same kinds; called from another thread.
        registry: of prometheus_client; None means its default one, which SGLang exports from all its processes.
    """

    def __init__(
        self,
        counters: Counters,
        versions: Versions,
        labels: Mapping[str, str],
        counted: Callable[[], Sequence[Counted]],
        registry: CollectorRegistry | None = None,
    ) -> None:
        # Not before SGLang has said in the environment where its processes meet.
        import prometheus_client

        self._counters, self._versions, self._labels = counters, versions, dict(labels)
        self._counted = lambda: [of_feature for of_feature in counted() if of_feature.label]
        self._exported: dict[tuple[str, ...], float] = {}
        registry = prometheus_client.REGISTRY if registry is None else registry
        self._families: dict[str, Any] = {}
        described_by = [
            ("load", LOAD_COUNTERS),
            ("position", POSITION_COUNTERS),
            *((of_feature.label, {f"{of_feature.name}_total": of_feature.text}) for of_feature in self._counted()),
        ]
        for label, described in described_by:
            for name, text in described.items():
                names = [*self._labels, label]
                self._families[name] = prometheus_client.Counter(PREFIX + name, text, names, registry=registry)
        self._misfit = prometheus_client.Gauge(
            PREFIX + "drafter_misfit",
            "1 if the drafter's first drafts say that it does not fit the target, NaN before they can.",
            list(self._labels),
            registry=registry,
            multiprocess_mode="mostrecent",
        )

    def start(self) -> None:
        """Update now and once a second, until the process ends."""
        self.update()
        threading.Thread(target=self._run, name="dspark-metrics", daemon=True).start()

    def _run(self) -> None:
        waiting, fails = threading.Event(), False
        while not waiting.wait(PERIOD_S):
            try:
                self.update()
                fails = False
            except (OSError, ValueError) as error:  # a full disk: metrics of several processes are files
                if not fails:
                    logger.warning("DSPARK: metrics cannot be updated, which is tried again every second: %r", error)
                fails = True

    def update(self) -> None:
        """Bring all metrics up to date."""
        for name, value, label in self._counts(self._counters.sums()):
            series = name, *label.values()
            self._families[name].labels(**self._labels, **label).inc(max(0.0, value - self._exported.get(series, 0.0)))
            self._exported[series] = value
        verdict = fit_of(self._versions.counts[-1]["first_drafts"]).verdict
        # NaN is a gap in a graph.
        misfit = float("nan") if verdict is FitVerdict.UNKNOWN else float(verdict is FitVerdict.MISFIT)
        self._misfit.labels(**self._labels).set(misfit)

    def _counts(self, sums: Sums) -> Iterator[tuple[str, float, dict[str, str]]]:
        for load, figures in sums.by_load():
            label = {"load": str(requests_of(load)[1])}
            for key, value in figures.counts().items():
                name = {"rounds": "request_steps"}.get(key, key) + "_total"
                if name in LOAD_COUNTERS:
                    yield name, value, label
            yield "step_seconds_measured_total", figures.measured_ms / 1e3, label
            yield "step_seconds_predicted_total", figures.predicted_ms / 1e3, label
        verified, _, accepted = sums.total().positions()
        columns = [verified, accepted, *sums.predicted]
        for name, values in zip(POSITION_COUNTERS, columns, strict=True):
            for position, value in enumerate(values.tolist()):
                yield name, value, {"position": str(position)}
        for of_feature in self._counted():
            for kind, number in list(of_feature.values.items()):
                yield f"{of_feature.name}_total", number, {of_feature.label: kind}
