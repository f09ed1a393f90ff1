"""Features beside the core: each has a folder here, and a line below. A folder that goes takes its line along.

docs/features.md says how to add one, and ``engine/feature.py`` what the core asks of a feature, and when.
"""

ROOMS = (
    "adapters",
    "adjustments",
    "builtin_worker",
    "ends",
    "experts",
    "hidden_states",
    "host_cache",
    "logprobs",
    "memory",
    "mixed_chunks",
    "nodes",
    "pictures",
    "prompt_lookup",
    "recurrent",
    "replicas",
    "reports",
    "sessions",
    "short_prompts",
    "slo",
    "streams",
    "weights",
)
