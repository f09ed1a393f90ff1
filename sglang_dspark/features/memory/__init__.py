"""Memory of the device that a server gives away for a while and takes back: weights, K/V and graphs."""

from sglang_dspark.engine.feature import Feature, FlagRule, off_gpu

FEATURE = Feature(
    __name__,
    is_used=lambda args: True,
    flag_rules=(
        FlagRule(
            "enable_memory_saver",
            (False,),
            "drop the flag: SGLang gives memory of GPUs away",
            beside=off_gpu,
        ),
    ),
)
