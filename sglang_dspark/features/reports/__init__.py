"""Reports of a server: statistics, metrics, the live page, the counts of every answer; and the policy switch.

In the scheduler ``served.py`` counts steps, and answers what the routes ask through ``channel.py``. ``prometheus.py``
exports the counts. ``traces.py`` tells every answer what became of its drafts.
"""

from __future__ import annotations

from sglang_dspark.engine.feature import Feature

FEATURE = Feature(
    __name__,
    is_used=lambda args: True,
    hooks={"front_end": ("traces",), "routes": ("routes",), "any_worker": ("served",)},
    part="served.Reports",
    of_any_worker=True,
    routes="routes.add",
)
