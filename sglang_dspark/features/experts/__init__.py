"""Experts that a target has routed the tokens of a text to, as SGLang returns them (``return_routed_experts``)."""

from sglang_dspark.engine.feature import Feature, FlagRule, off_gpu
from sglang_dspark.features.experts.served import RoutedExperts

FEATURE = Feature(
    __name__,
    is_used=lambda args: args.enable_return_routed_experts,
    flag_rules=(
        FlagRule(
            "enable_return_routed_experts",
            (False,),
            "drop the flag: SGLang keeps the experts of tokens in pinned memory, which PyTorch has only beside a GPU",
            beside=off_gpu,
        ),
    ),
    part=RoutedExperts,
)
