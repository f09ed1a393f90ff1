"""LoRA adapters of the target: requests name them, and each row of a verification gets those of its request."""

from sglang_dspark.engine.feature import Feature, FlagRule
from sglang_dspark.features.adapters.checks import CHECKS, asks_for_adapters
from sglang_dspark.features.adapters.served import Adapters

BACKENDS = {"cuda": ("csgmv", "triton"), "cpu": ("torch_native",)}
"""LoRA backends whose kernels compute ragged rows. On a GPU the torch one would read their numbers on the host."""


def _backend(device: str) -> FlagRule:
    return FlagRule(
        "lora_backend",
        BACKENDS[device],
        f"its kernels compute as many rows as each request verifies on {device}",
        adjusts=True,
        beside=lambda context: context.args.device == device and asks_for_adapters(context.args),
    )


FEATURE = Feature(
    __name__,
    is_used=asks_for_adapters,
    flag_rules=(
        FlagRule("enable_lora_overlap_loading", (None, False), "adapters are served without it", adjusts=True),
        *map(_backend, BACKENDS),
    ),
    checks=CHECKS,
    part=Adapters.of,
)
