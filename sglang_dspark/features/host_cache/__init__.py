"""Prefixes that move to host memory and come back (SGLang's hierarchical cache): the drafter's K/V moves along."""

from sglang_dspark.engine.feature import Feature, FlagRule, off_gpu
from sglang_dspark.features.host_cache.served import HostCache

FEATURE = Feature(
    __name__,
    is_used=lambda args: args.enable_hierarchical_cache,
    flag_rules=(
        FlagRule(
            "hicache_storage_backend",
            (None,),
            "prefixes can move to host memory, but not beyond it",
            adjusts=True,
        ),
        FlagRule(
            "enable_hierarchical_cache",
            (False,),
            "SGLang copies K/V to host memory with CUDA kernels",
            adjusts=True,
            beside=off_gpu,
        ),
        FlagRule(
            "enable_hierarchical_cache",
            (False,),
            "it is not tried with two K/V pools; --disable-hybrid-swa-memory gives one if all heads are alike",
            adjusts=True,
            beside=lambda context: context.target.is_hybrid_swa,
        ),
    ),
    part=HostCache,
)
