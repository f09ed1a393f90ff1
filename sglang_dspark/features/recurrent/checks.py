"""Refuse what recurrent layers are not served with."""

from sglang.srt.utils import cpu_has_amx_support

from sglang_dspark.engine.launch.check import Check, Stage
from sglang_dspark.engine.launch.context import LaunchContext
from sglang_dspark.engine.launch.flag_rule import flag_of

UNSERVED = (
    "enable_hierarchical_cache",
    "enable_int8_mamba_checkpoint",
    "enable_linear_replayssm",
    "enable_linear_replayssm_spec",
    "enable_lora",
    "enable_mamba_cache_stochastic_rounding",
    "enable_streaming_session",
    "lora_paths",
)
"""Flags that change where states lie or what is in them, that move K/V without them, or that are not tried."""


def packed_layers(context: LaunchContext) -> str | None:
    """Refuse such targets on a CPU whose kernels keep the layers before the recurrent ones in another layout."""
    family, found = context.family, context.args.device
    if not family.recurrent or found != "cpu" or not cpu_has_amx_support():
        return None
    return (
        f"--model-path: target architecture {family.architecture} is not served with DSPARK on {found}: its layers "
        "keep recurrent states, and SGLang's kernels for this CPU pack the convolutions before them for AMX; install "
        "the published sglang-kernel in their place, and run sglang-dspark enable-cpu"
    )


def flags(context: LaunchContext) -> str | None:
    """Refuse flags that are not served beside recurrent layers."""
    if not context.family.recurrent:
        return None
    args, resolved, least = context.args, context.resolved, 2 * context.server.window
    remedies = {flag_of(name): "drop the flag" for name in UNSERVED if getattr(args, name)}
    prefill = resolved.linear_attn_prefill_backend or resolved.linear_attn_backend
    if prefill != "triton":
        remedies[f"--linear-attn-prefill-backend={prefill}"] = "pass triton: states of other kernels are not tried"
    strategy = resolved.mamba_radix_cache_strategy
    if strategy == "extra_buffer_lazy":
        remedies["--mamba-radix-cache-strategy=extra_buffer_lazy"] = "pass extra_buffer"
    # Under overlap two steps may pass before SGLang takes the state that the first of them has left.
    if strategy == "extra_buffer" and resolved.mamba_track_interval < least:
        remedies[f"--mamba-track-interval={resolved.mamba_track_interval}"] = f"pass {least} or more"
    messages = [
        f"DSPARK cannot run with {flag} beside a target with recurrent layers; {remedy}"
        for flag, remedy in remedies.items()
    ]
    return "\n".join(messages) or None


CHECKS = (
    Check("recurrent layers", Stage.MODELS, packed_layers, unserved=True),
    Check("flags beside recurrent layers", Stage.FLAGS, flags),
)
