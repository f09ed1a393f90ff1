"""Features beside the core: each has a folder here, and a line below. A folder that goes takes its line along.

How to add one: docs/features.md. ``engine/feature.py`` says what the core asks of a feature, and when.
"""

ROOMS = (
    "adapters",
    "adjustments",
    "ends",
    "host_cache",
    "logprobs",
    "nodes",
    "pictures",
)
