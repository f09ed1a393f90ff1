"""Checks that need target, drafter and device alone. `doctor` makes them without a server."""

from pathlib import Path

import torch
from dspark_kernels import widest_window

from sglang_dspark.config import flag_name
from sglang_dspark.draft.families import is_left_to_sglang
from sglang_dspark.draft.pairing import check_dimensions, lacks_own
from sglang_dspark.draft.target_files import quantised_layers
from sglang_dspark.draft.weights import own_tensors
from sglang_dspark.engine.feature import LaunchContext
from sglang_dspark.engine.support import DEVICES, gpu_refusal


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
    """Return why our worker leaves a device or target to SGLang's own, which may serve it.

    Returns:
        None if ours serves both, or neither worker does.
    """
    architectures = context.target.hf_config.architectures
    if is_left_to_sglang(architectures):
        return ", ".join(architectures or ["a target without an architecture"])
    return device(context)


def dimensions(context: LaunchContext) -> None:
    """Refuse a drafter that was made for another target."""
    if (drafter := context.server.drafter) is not None:
        check_dimensions(drafter.config, context.text_config)


def own_layers(context: LaunchContext) -> str | None:
    """Refuse a drafter that would read a quantised layer of its target.

    What only shows once the target is loaded, its handle refuses then.
    """
    drafter, target = context.server.drafter, context.target
    if drafter is None or target.quantization is None:
        return None
    own: frozenset[str] = frozenset() if context.server.dummy_draft else own_tensors(drafter.path, drafter.reading)
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
        f"{given}, but the drafter's files are {found}; drop the flag: the files say how they are stored, and "
        f"{flag_name('draft_quantization')} what is made of them"
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
                f"{flag_name('block_size')}={server.gamma} needs {width} rows of attention per request, and heads of "
                f"{head_dim} in {dtype} leave room for {room}; pass {server.gamma - width + room} or less"
            )
    return None
