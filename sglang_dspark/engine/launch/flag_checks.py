"""Checks of flags and variables, ours and SGLang's."""

from collections.abc import Mapping
from pathlib import Path

import torch
from sglang.srt.arg_groups.overrides import attention_backends_of
from sglang.srt.environ import EnvField, envs

from sglang_dspark.calibration.sts import StsCalibration
from sglang_dspark.config import flag_name
from sglang_dspark.engine.api.http import APP_OF_WORKERS
from sglang_dspark.engine.feature import LaunchContext, flag_of
from sglang_dspark.engine.launch import flag_rules

VARIABLES: Mapping[EnvField, str] = {
    envs.SGLANG_RUST_SERVER: "requests are checked on their way through the Python server",
    envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING: "the drafter's K/V pool has the size that the target's has at first",
    envs.SGLANG_USE_HND_KVCACHE: "verification reads a K/V pool whose slots lie one after the other",
}
"""Switches in the environment that are served off, and why."""
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
        "dtype or in eight bits; pass auto, or --dtype bfloat16"
    )


def flags(context: LaunchContext) -> str | None:
    """Refuse flags of SGLang that rules refuse."""
    return "\n".join(rule.refusal(context.args) for rule in flag_rules.broken(context, adjusts=False)) or None


def variables(context: LaunchContext) -> str | None:
    """Refuse variables of SGLang that a server with our worker cannot follow."""
    found = (
        f"DSPARK cannot run with {variable.name}=1 in the environment; unset it: {why}"
        for variable, why in VARIABLES.items()
        if variable.get()
    )
    return "\n".join(found) or None


def prefill_attention(context: LaunchContext) -> str | None:
    """Refuse attention of prompts that SGLang itself has chosen, and that is not served."""
    served, (prefill, _) = flag_rules.PREFILL_BACKENDS.get(context.args.device), attention_backends_of(context.args)
    if served is None or prefill in served:
        return None
    return (
        f"DSPARK cannot run with --attention-backend={prefill} on {context.args.device}; pass --attention-backend "
        f"{' or '.join(served)}"
    )


def application(context: LaunchContext) -> str | None:
    """Refuse keys that no worker asks for, and another application in place of ours, which checks requests there."""
    args, variable = context.args, envs.SGLANG_HTTP_SERVER_APP_PATH
    if args.tokenizer_worker_num == 1:
        return None
    beside = f"cannot be combined with --tokenizer-worker-num={args.tokenizer_worker_num}"
    if given := [flag_of(name) for name in ("api_key", "admin_api_key") if getattr(args, name)]:
        return (
            f"{' and '.join(given)} {beside}: SGLang asks for keys in a single worker only; drop one of the flags, and "
            "have a proxy ask for keys"
        )
    if variable.get() not in (variable.default, APP_OF_WORKERS):
        return f"{variable.name}={variable.get()} in the environment {beside}, whose application is DSPARK's; unset it"
    return None
