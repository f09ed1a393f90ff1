"""Checks of flags and variables, ours and SGLang's."""

from pathlib import Path

import torch
from sglang.srt.arg_groups.overrides import attention_backends_of
from sglang.srt.environ import EnvField, envs

from sglang_dspark.calibration.sts import StsCalibration
from sglang_dspark.config import flag_name
from sglang_dspark.engine.launch import flag_rules
from sglang_dspark.engine.launch.context import LaunchContext
from sglang_dspark.engine.launch.flag_rule import flag_of
from sglang_dspark.engine.sglang_types import ModelConfig

PREFILL_BACKENDS = {"cpu": ("torch_native",), "cuda": ("fa3", "flashinfer", "triton")}
"""Attention of prompts, by device. Verification has kernels of its own, which read the K/V pools of all of these."""
SINKS, WINDOWS, WIDE_HEADS = "attention sinks", "a K/V pool of its own for layers with a window", "heads of over 256"
KNOWN_BY = {SINKS: ("fa3", "triton"), WINDOWS: ("fa3", "flashinfer", "triton"), WIDE_HEADS: ("triton",)}
"""What a target may have, and those of them that know it."""
PAGE_DEVICES = ("cuda",)
"""Devices that have SGLang's kernels for slots in pages."""
DRAFT_FORMATS = (None, "auto", "safetensors", "gguf", "dummy")


def drafter_beside_draft_free(context: LaunchContext) -> str | None:
    """Refuse a drafter for a server that is to have none."""
    path = context.args.speculative_draft_model_path
    if path is None or not context.server.config.draft_free:
        return None
    return (
        f"--speculative-draft-model-path={path} names a drafter, and {flag_name('draft_free')} serves without one; "
        "drop one of the flags"
    )


def draft_window(context: LaunchContext) -> str | None:
    """Refuse a window of the drafter's context that is none."""
    size, sinks = (getattr(context.args, f"speculative_draft_{name}_size") for name in ("window", "sink"))
    if size is None and sinks is None:
        return None
    given = f"--speculative-draft-sink-size={sinks}" if size is None else f"--speculative-draft-window-size={size}"
    if context.server.config.draft_free:
        return f"{given} belongs to a drafter, and {flag_name('draft_free')} serves without one; drop one of the flags"
    if size is None:
        return (
            f"{given} needs --speculative-draft-window-size: without a window the drafter sees the first tokens anyway"
        )
    if size < 1:
        return f"{given} leaves nothing of a context; pass 1 or more, or drop the flag"
    if sinks is not None and sinks < 0:
        return f"--speculative-draft-sink-size={sinks} is no number of tokens; pass 0 or more, or drop the flag"
    return None


def draft_load_format(context: LaunchContext) -> str | None:
    """Refuse forms of weights that drafters do not have."""
    given = context.args.speculative_draft_load_format
    if given in DRAFT_FORMATS:
        return None
    return (
        f"--speculative-draft-load-format={given}: DSPARK reads drafters as safetensors or GGUF; drop the flag, or "
        "pass dummy for random weights"
    )


def expert_kernels(context: LaunchContext) -> str | None:
    """Refuse kernels of experts that SGLang has for data-parallel attention alone, before it chooses a drafter's."""
    for name in ("moe_a2a_backend", "moe_runner_backend"):
        if getattr(context.args, name) == "flashinfer_megamoe":
            return (
                f"DSPARK cannot run with {flag_of(name)}=flashinfer_megamoe, which SGLang offers only with "
                "data-parallel attention; drop the flag"
            )
    return None


def draft_tokens(context: LaunchContext) -> str | None:
    """Refuse SGLang's number of draft tokens if it is not the block's."""
    given, needed = context.args.speculative_num_draft_tokens, context.server.gamma + 1
    if given in (None, needed):
        return None
    return (
        f"--speculative-num-draft-tokens={given} contradicts the block size {needed - 1}; pass {needed} or drop the "
        "flag"
    )


def simulated_acceptance(context: LaunchContext) -> str | None:
    """Refuse simulated acceptance on real weights, whose text it would spoil."""
    profile = context.server.config.acceptance_profile(context.server.gamma)
    if profile is None or context.args.load_format == "dummy":
        return None
    return (
        f"{flag_name('simulate_acceptance')}={profile[0]},... keeps drafts by chance, so the text has no meaning; pass "
        "it with --load-format dummy to measure step times, or drop it"
    )


def confidence_head(context: LaunchContext) -> str | None:
    """Refuse a policy that needs confidences of a drafter that has none."""
    config, drafter = context.server.config, context.server.drafter
    if config.schedule != "threshold" or drafter is None or drafter.config.predicts_acceptance:
        return None
    return (
        f"{flag_name('schedule')}=threshold needs a confidence head, and {drafter.config.origin} has none; pass auto "
        "or static"
    )


def temperatures(context: LaunchContext) -> None:
    """Refuse a bad file of temperatures before the target is loaded; the worker reads it again."""
    path, drafter = context.server.config.confidence_sts_path, context.server.drafter
    if path is not None and drafter is not None:
        drawn = drafter.config.drawn(context.server.gamma)
        StsCalibration.load(Path(path), drawn, target=context.args.model_path, draft=drafter.path)


def kv_dtype(context: LaunchContext) -> str | None:
    """Refuse K/V in bfloat16 of a target in another dtype."""
    given, dtype = context.args.kv_cache_dtype, context.target.dtype
    if given not in ("bfloat16", "bf16") or dtype == torch.bfloat16:
        return None
    return (
        f"DSPARK cannot run with --kv-cache-dtype={given} beside a target in {dtype}: it serves K/V in the target's "
        "dtype or in fp8_e4m3; pass auto, or --dtype bfloat16"
    )


def flags(context: LaunchContext) -> str | None:
    """Refuse flags of SGLang that `flag_rules.py` names."""
    return "\n".join(flag_rules.refusals(context.args, context.resolved)) or None


def pages(context: LaunchContext) -> str | None:
    """Refuse K/V in pages of several slots where no kernel hands them out."""
    size = context.args.page_size
    if size in (None, 1) or context.args.device in PAGE_DEVICES:
        return None
    return (
        f"DSPARK cannot run with --page-size={size} on {context.args.device}: SGLang hands out pages with CUDA "
        "kernels; pass 1"
    )


def rust_server(context: LaunchContext) -> str | None:
    """Refuse a server that requests reach without our checks."""
    return _variable(envs.SGLANG_RUST_SERVER, "unset it: requests are checked on their way through the Python server")


def kv_sizing(context: LaunchContext) -> str | None:
    """Refuse a K/V pool that changes its size after the drafter's has been made."""
    remedy = "unset it: the drafter's K/V pool has the size that the target's has at first"
    return _variable(envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING, remedy)


def _variable(variable: EnvField, remedy: str) -> str | None:
    return f"DSPARK cannot run with {variable.name}=1 in the environment; {remedy}" if variable.get() else None


def prefill_attention(context: LaunchContext) -> str | None:
    """Refuse backends for prompts that do not return hidden states, or do not know what the target has."""
    if context.args.device not in PREFILL_BACKENDS:
        return None
    found = _found_in(context.target)

    def served_on(device: str) -> list[str]:
        return [name for name in PREFILL_BACKENDS[device] if all(name in KNOWN_BY[what] for what in found)]

    served, (prefill, _) = served_on(context.args.device), attention_backends_of(context.resolved)
    if prefill in served:
        return None
    has = f"the target has {' and '.join(found)}: " if found else ""
    on_a_gpu = "" if served else "serve it on a GPU and "
    remedy = f"{has}{on_a_gpu}pass --attention-backend {' or '.join(served or served_on('cuda'))}"
    return f"DSPARK cannot run with --attention-backend={prefill} on {context.args.device}; {remedy}"


def _found_in(target: ModelConfig) -> list[str]:
    """Return what the target has out of :data:`KNOWN_BY`."""
    has = {SINKS: target.has_attention_sinks, WINDOWS: target.is_hybrid_swa, WIDE_HEADS: target.head_dim > 256}
    return [what for what in KNOWN_BY if has[what]]


def decode_attention(context: LaunchContext) -> str | None:
    """Refuse a choice of attention for decoding, which is our own."""
    prefill, decode = attention_backends_of(context.resolved)
    if decode == prefill:
        return None
    return (
        f"DSPARK cannot run with --decode-attention-backend={decode}: verification has kernels of its own; drop the "
        "flag"
    )


def prefill_graphs(context: LaunchContext) -> str | None:
    """Refuse graphs of prefills that lose the hidden states."""
    graphs = context.args.cuda_graph_backend_prefill
    if graphs in (None, "breakable", "disabled"):
        return None
    return (
        f"DSPARK cannot run with --cuda-graph-backend-prefill={graphs}, whose graphs lose the hidden states that a "
        "drafter reads; pass breakable or disabled"
    )
