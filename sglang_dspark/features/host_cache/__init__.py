"""Prefixes that move to host memory and come back (SGLang's hierarchical cache): the drafter's K/V moves along."""

from sglang_dspark.engine.feature import Feature
from sglang_dspark.engine.launch.flag_rule import FlagRule

FEATURE = Feature(
    __name__,
    is_used=lambda args: args.enable_hierarchical_cache,
    flag_rules=(
        FlagRule(
            "hicache_storage_backend",
            (None,),
            "drop the flag: prefixes can move to host memory, but not beyond it",
        ),
    ),
    checks="checks.CHECKS",
    part="served.HostCache.of",
)
