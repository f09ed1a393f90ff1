"""Features next to the core: each has a module or a folder here, and a line below.

docs/features.md says how to add one, ``engine/feature.py`` what it declares, and ``engine/part.py`` what the core asks
of it, and when.
"""

FEATURES = (
    "adapters",
    "builtin_worker",
    "experts",
    "hidden_states",
    "host_cache",
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
