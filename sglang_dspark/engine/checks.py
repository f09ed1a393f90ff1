"""Checks everything that a start of the core can be refused for; servers and `doctor` make these with features' checks.

Those of ``Stage.MODELS`` need target, drafter and device only: `doctor` makes them without a server. Also, ``start.py``
refuses a drafter that cannot be read, and ``config.py`` options that contradict each other.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from dspark_kernels import WINDOW_ROWS, widest_window
from sglang.srt.arg_groups.overrides import attention_backends_of
from sglang.srt.environ import EnvField, envs

from sglang_dspark.config import flag_name
from sglang_dspark.draft.config import check_dimensions, lacks_own
from sglang_dspark.draft.families import is_left_to_sglang
from sglang_dspark.draft.stored import quantised_layers
from sglang_dspark.draft.weights import check_draft_model
from sglang_dspark.engine.feature import Check, LaunchContext, Stage, all_features, flag_of
from sglang_dspark.engine.flags import PREFILL_BACKENDS, broken_rules
from sglang_dspark.engine.http import APP_OF_WORKERS
from sglang_dspark.engine.support import DEVICES, gpu_refusal
from sglang_dspark.errors import ConfigError, UnservedError
from sglang_dspark.scheduling.sts import StsCalibration

VARIABLES: Mapping[EnvField, str] = {
    envs.SGLANG_RUST_SERVER: "DSPARK checks requests in SGLang's Python server",
    envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING: "SGLang would resize the target's K/V pool after DSPARK has made the "
    "drafter's in the same size",
    envs.SGLANG_USE_HND_KVCACHE: "DSPARK's attention kernels read the K/V pool in the NHD layout only",
}
"""Switches in the environment that are served off, and why."""
DRAFT_FORMATS = (None, "auto", "safetensors", "gguf", "dummy")


def drafter_with_draft_free(context: LaunchContext) -> str | None:
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
            f"{given} has no effect without --speculative-draft-window-size, because the drafter then sees the whole "
            "context; pass both flags or neither"
        )
    if size < 1:
        return f"{given} lets the drafter see no token of a context; pass 1 or more, or drop the flag"
    if sinks is not None and sinks < 0:
        return f"--speculative-draft-sink-size={sinks} is negative; pass 0 or more, or drop the flag"
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
        f"{flag_name('simulate_acceptance')}={profile[0]},... keeps drafts at random, so the text has no meaning; pass "
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
        f"DSPARK cannot run with --kv-cache-dtype={given} and a target in {dtype}: it serves K/V in the target's "
        "dtype or in 8 bits; pass --kv-cache-dtype auto, or --dtype bfloat16"
    )


def refused_flags(context: LaunchContext) -> str | None:
    """Refuse flags of SGLang that rules refuse."""
    return "\n".join(rule.refusal(context.args) for rule in broken_rules(context, adjusts=False)) or None


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
    served, (prefill, _) = PREFILL_BACKENDS.get(context.args.device), attention_backends_of(context.args)
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
    conflict = f"cannot be combined with --tokenizer-worker-num={args.tokenizer_worker_num}"
    if given := [flag_of(name) for name in ("api_key", "admin_api_key") if getattr(args, name)]:
        return (
            f"{' and '.join(given)} {conflict}: SGLang checks API keys only with one tokenizer worker; drop "
            "--tokenizer-worker-num, or have a proxy check keys"
        )
    if variable.get() not in (variable.default, APP_OF_WORKERS):
        return (
            f"{variable.name}={variable.get()} in the environment {conflict}: DSPARK puts an application of its own "
            "there, which checks requests; unset the variable"
        )
    return None


def device(context: LaunchContext) -> str | None:
    """Refuse devices, and GPUs, that no kernel is made for."""
    found = context.args.device
    if found not in DEVICES:
        return (
            f"DSPARK cannot run with --device={found}; pass cpu or cuda, or {flag_name('engine')} builtin if SGLang's "
            "own worker knows the device"
        )
    if found == "cpu" or not torch.cuda.is_available():  # SGLang itself says that there is no GPU
        return None
    refusal = gpu_refusal(torch.cuda.get_device_capability(), rocm=torch.version.hip is not None)
    return refusal and f"DSPARK cannot run with --device=cuda: {refusal}"


def family(context: LaunchContext) -> None:
    """Refuse targets of classes that are not served."""
    _ = context.text_config


def why_not_ours(context: LaunchContext) -> str | None:
    """Say why our worker leaves a device or target to SGLang's own, which may serve it.

    Returns:
        None if ours serves both, or neither worker does.
    """
    architectures = context.target.hf_config.architectures
    if is_left_to_sglang(architectures):
        return f"the plugin's worker does not serve {', '.join(architectures or ['a target without an architecture'])}"
    return device(context)


def dimensions(context: LaunchContext) -> None:
    """Refuse a drafter that was made for another target."""
    if (drafter := context.server.drafter) is not None:
        check_dimensions(drafter.config, context.text_config)


def own_layers(context: LaunchContext) -> str | None:
    """Refuse a drafter that would read a quantised layer of its target.

    What only shows once the target is loaded, ``target.Target`` refuses then.
    """
    drafter, target = context.server.drafter, context.target
    if drafter is None or target.quantization is None:
        return None
    is_dummy = context.server.dummy_draft
    own: frozenset[str] = frozenset() if is_dummy else check_draft_model(drafter.path, drafter.reading)
    tied = bool(getattr(context.text_config, "tie_word_embeddings", False))
    for layer in quantised_layers(Path(context.args.model_path), tied=tied):
        if f"{layer}.weight" not in own:
            raise lacks_own(drafter.config, layer, f"is quantised ({target.quantization})")
    return None


def draft_storage(context: LaunchContext) -> str | None:
    """Refuse flags that say otherwise than the drafter's files how it is stored."""
    drafter, args = context.server.drafter, context.args
    storage = None if drafter is None else drafter.reading.storage
    methods = frozenset() if storage is None else storage.methods
    found = "not quantised" if storage is None else storage.words
    form, is_gguf = args.speculative_draft_load_format, "gguf" in methods
    if args.speculative_draft_model_quantization not in (None, "unquant", *methods):
        given = f"--speculative-draft-model-quantization={args.speculative_draft_model_quantization}"
    elif form in ("gguf", "safetensors") and (form == "gguf") != is_gguf:
        given = f"--speculative-draft-load-format={form}"
    else:
        return None
    return (
        f"{given}, but the drafter's files are {found}; drop the flag: DSPARK reads from the files how they are stored"
    )


def block_size(context: LaunchContext) -> None:
    """Refuse longer blocks than the drafter has, and more drafts to verify than a block has."""
    _ = context.server.window


def rope(context: LaunchContext) -> str | None:
    """Refuse contexts in which a target with LongRoPE changes its factors.

    SGLang takes the long factors for a whole batch as soon as one of its tokens lies beyond the limit.
    """
    text_config, window = context.text_config, context.server.window
    scaling = getattr(text_config, "rope_parameters", None) or getattr(text_config, "rope_scaling", None) or {}
    if scaling.get("rope_type", scaling.get("type")) != "longrope":
        return None
    key = "original_max_position_embeddings"
    limit = int(scaling.get(key) or getattr(text_config, key))
    if context.target.context_len + window <= limit:
        return None
    return (
        f"--context-length={context.target.context_len}: beyond {limit} tokens the LongRoPE of the target "
        "(--model-path) depends on what else is in a batch, so that drafts would change the text; pass "
        f"--context-length {limit - window} or less"
    )


def attention_rows(context: LaunchContext) -> str | None:
    """Refuse a block for which a GPU has no room in one attention kernel."""
    if context.args.device != "cuda":
        return None
    server, dtype = context.server, context.target.dtype
    # The target's verification sees an anchor and drafts, the drafter's block its slots.
    windows = {context.target.head_dim: server.window}
    if server.drafter is not None:
        config = server.drafter.config
        windows[config.head_dim] = max(windows.get(config.head_dim, 0), config.num_slots(server.gamma))
    for head_dim, width in windows.items():
        if width > (room := widest_window(head_dim, dtype)):
            return (
                f"{flag_name('block_size')}={server.gamma} needs {width} rows per request in the attention kernel, "
                f"which has room for {room} with a head_dim of {head_dim} in {dtype}; pass "
                f"{server.gamma - width + room} or less"
            )
    return None


def same_bits(context: LaunchContext) -> str | None:
    """Refuse on a GPU what would give a row other bits in another batch; on a CPU ``engine.same_bits`` does."""
    args, server = context.args, context.server
    if not server.same_bits or args.device != "cuda":
        return None
    refused = "DSPARK cannot run with --enable-deterministic-inference=True"
    if server.window > WINDOW_ROWS:
        return (
            f"{refused} and a step that verifies {server.window} rows per request; pass {flag_name('block_size')} "
            f"{WINDOW_ROWS - 1} or less"
        )
    if args.enable_mixed_chunk or server.config.prompt_rows or "prompt-rows" in server.config.unproven:
        mixed = f"--enable-mixed-chunk, {flag_name('prompt_rows')} and {flag_name('unproven')} prompt-rows"
        return f"{refused} and prompts in the same forward pass as drafts; drop {mixed}"
    if context.family.recurrent:
        return f"{refused}: recurrent layers sum a prompt in another order than drafts; drop the flag"
    if context.family.reads_images:
        return f"{refused}: SGLang's backends compute the attention over pictures; drop the flag"
    if args.enable_lora:
        return f"{refused} and --enable-lora: an adapter is computed for all of its rows together; drop one of them"
    return None


def refuse(context: LaunchContext, *stages: Stage) -> None:
    """Make all checks of these stages, and raise the messages of those that fail, one a line.

    The error is an :class:`UnservedError` if one says that DSPARK does not serve the device, the target or the pair.
    """
    if failed := failures(context, *stages):
        kind = UnservedError if any(failed.values()) else ConfigError
        raise kind("\n".join(failed))


def failures(context: LaunchContext, *stages: Stage) -> dict[str, bool]:
    """Return the messages of the checks of these stages that fail; True if DSPARK does not serve what is there."""
    failed: dict[str, bool] = {}
    for check in all_checks():
        if check.stage in stages and (message := check.message(context)):
            # A check that needs what another one has refused says the same.
            failed.setdefault(message, check.unserved)
    return failed


def all_checks() -> tuple[Check, ...]:
    """Return the checks of the core and those of all features."""
    return (*CHECKS, *(check for feature in all_features() for check in feature.checks))


CHECKS: tuple[Check, ...] = (
    Check("drafter with draft-free", Stage.OPTIONS, drafter_with_draft_free),
    Check("window of the drafter", Stage.OPTIONS, draft_window),
    Check("form of draft weights", Stage.OPTIONS, draft_load_format),
    Check("application of tokenizer workers", Stage.OPTIONS, application),
    Check("device", Stage.MODELS, device, unserved=True),
    Check("target family", Stage.MODELS, family, unserved=True),
    Check("dimensions of the pair", Stage.MODELS, dimensions, unserved=True),
    Check("layers read from the target", Stage.MODELS, own_layers, unserved=True),
    Check("storage of the drafter", Stage.MODELS, draft_storage),
    Check("block size", Stage.MODELS, block_size),
    Check("context of the target's RoPE", Stage.MODELS, rope, unserved=True),
    Check("rows of attention", Stage.MODELS, attention_rows),
    Check("simulated acceptance", Stage.FLAGS, simulated_acceptance),
    Check("confidence head", Stage.FLAGS, confidence_head),
    Check("temperatures", Stage.FLAGS, temperatures),
    Check("dtype of K/V", Stage.FLAGS, kv_dtype),
    Check("flags of SGLang", Stage.FLAGS, refused_flags),
    Check("variables of SGLang", Stage.FLAGS, variables),
    Check("attention of prompts", Stage.FLAGS, prefill_attention),
    Check("the same bits", Stage.FLAGS, same_bits),
)
