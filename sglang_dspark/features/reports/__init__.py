"""Reports of a server: statistics, metrics, the live page, the counts of every answer; and the policy switch.

In the scheduler ``served.py`` counts steps, and answers what the routes ask through ``channel.py``. ``prometheus.py``
exports the counts. ``traces.py`` tells every answer what became of its drafts.
"""

from __future__ import annotations

from sglang_dspark.engine.feature import Feature
from sglang_dspark.features.reports.routes import add
from sglang_dspark.features.reports.served import Reports

FEATURE = Feature(
    __name__,
    is_used=lambda args: True,
    part=Reports,
    of_any_worker=True,
    routes=add,
)
