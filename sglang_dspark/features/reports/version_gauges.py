"""Metrics by version of the weights: of as many as the statistics keep, however many there were."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_dspark.calibration.fit import Verdict
from sglang_dspark.features.reports.first_drafts import fit_of
from sglang_dspark.features.reports.versions import Count

GAUGES = {
    "weight_version_rounds": "Requests, summed over the decode steps, with this version of the weights.",
    "weight_version_tokens": "Tokens gained in them.",
    "weight_version_misfit": "1 if first drafts say that the drafter does not fit this version, NaN before they can.",
}
"""By labels ``weight_version`` and ``drafter``."""


def misfit(first_drafts: Mapping[str, float]) -> float:
    """Return 1.0 if first drafts say that a drafter does not fit, 0.0 if it does; NaN, a gap in a graph, before."""
    verdict = fit_of(first_drafts).verdict
    return float("nan") if verdict is Verdict.UNKNOWN else float(verdict is Verdict.MISFIT)


class VersionGauges:
    """Writes a file of its own, among those in which the processes of a server leave their metrics.

    What a label was given stays in such a file, so there is a new one with each version, in the place of the old one.

    Args:
        prefix: of the metrics' names.
        labels: on every metric.
    """

    def __init__(self, prefix: str, labels: Mapping[str, Any]) -> None:
        self._prefix, self._labels = prefix, {name: str(value) for name, value in labels.items()}
        self._keys: list[Any] = []
        self._file: Any = None

    def update(self, versions: Sequence[Count]) -> None:
        """Write what each version has come to."""
        from prometheus_client.mmap_dict import MmapedDict

        keys, path = [count["key"] for count in versions], None
        if keys != self._keys:
            # Prometheus reads files whose name ends in .db, and expects that live gauges vanish.
            path = Path(os.environ["PROMETHEUS_MULTIPROC_DIR"], f"gauge_livemostrecent_{os.getpid()}versions")
            if self._file is not None:
                self._file.close()
            path.unlink(missing_ok=True)
            self._file = MmapedDict(path)
        for key, value in self._values(versions):
            self._file.write_value(key, value, time.time())
        if path is not None:
            path.replace(path.with_name(path.name + ".db"))
            self._keys = keys

    def _values(self, versions: Sequence[Count]) -> Iterator[tuple[str, float]]:
        from prometheus_client.mmap_dict import mmap_key

        names = [*self._labels, "weight_version", "drafter"]
        for count in versions:
            values = count["rounds"], count["tokens"], misfit(count["first_drafts"])
            for (gauge, text), value in zip(GAUGES.items(), values, strict=True):
                name = self._prefix + gauge
                yield mmap_key(name, name, names, [*self._labels.values(), *count["key"]], text), value
