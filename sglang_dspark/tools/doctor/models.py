"""Whether a drafter fits a target, from their files. Runs on the CPU whatever the server will use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_dspark.errors import CheckpointError, DSparkError
from sglang_dspark.tools.doctor.finding import Finding

if TYPE_CHECKING:
    import torch

    from sglang_dspark.draft.config import DraftConfig
    from sglang_dspark.draft.formats.description import Switch
    from sglang_dspark.draft.model import DraftModel
    from sglang_dspark.tools.golden import GoldenReport


def check_pair(target_dir: Path, draft_dir: Path) -> Iterator[Finding]:
    """Configurations, tensors and memory of a target and its drafter. Stops at the first thing that does not fit."""
    from sglang_dspark.draft.families import family_of
    from sglang_dspark.draft.formats import read
    from sglang_dspark.draft.formats.description import describe, new_to
    from sglang_dspark.draft.pairing import check_dimensions
    from sglang_dspark.draft.weights import load_draft_model

    try:
        reading = read(draft_dir)
        draft = reading.config
        yield Finding("ok", "drafter", f"{reading.format} format: {describe(draft)}")
        if reading.unknown_keys:
            unknown = ", ".join(reading.unknown_keys)
            remedy = (
                "harmless unless one of them changes the network: then drafts are poor, and the text is right still"
            )
            yield Finding("note", "drafter", f"unknown keys in config.json: {unknown}", remedy)
        config = _read_target_config(target_dir)
        target = config.get_text_config()
        family = family_of(config.architectures)
        check_dimensions(draft, target)
        yield Finding("ok", "target", _describe_target(config.architectures, target))
        if family.remark:
            yield Finding("note", "target", family.remark)
        yield from _switches(draft, new_to(target.to_dict(), draft))
        model = load_draft_model(draft_dir, dtype=_dtype(target), device="cpu")
        num_tensors = sum(1 for _ in model.parameters())
        _check_finite(model)
        shared = _bind(model, target_dir, target)
        yield Finding("ok", "tensors", f"{num_tensors} tensors, all expected, all finite; {_describe_memory(model)}")
        yield Finding("ok", "shared", f"read from the target: {', '.join(shared) or 'nothing'}")
    except DSparkError as error:
        yield Finding("fail", "pair", str(error))


def _switches(draft: DraftConfig, new: Sequence[Switch]) -> Iterator[Finding]:
    """What the drafter's network does beside DeepSpec's, and which of it the target's layers do not."""
    from sglang_dspark.draft.formats.description import switches

    found = switches(draft)
    yield Finding(
        "ok", "switches", "; ".join(f"{s.name}: {s.words}" for s in found) or "none: the network is DeepSpec's"
    )
    if new:
        words = "; ".join(f"{switch.name}: {switch.words}" for switch in new)
        remedy = "right if the drafter was trained so; otherwise few drafts are accepted, and the text is right still"
        yield Finding("note", "switches", f"new to this pair, for the target has them not: {words}", remedy)


def _describe_target(architectures: Sequence[str], target: Any) -> str:
    return (
        f"{', '.join(architectures)}: hidden size {target.hidden_size}, vocabulary {target.vocab_size}, "
        f"{target.num_hidden_layers} layers, as the drafter expects"
    )


def _describe_memory(model: DraftModel) -> str:
    from sglang_dspark.draft.cache import bytes_per_token

    parameters = list(model.parameters())
    count = sum(parameter.numel() for parameter in parameters)
    size_mib = sum(parameter.numel() * parameter.element_size() for parameter in parameters) / 2**20
    dtype = model.fc.weight.dtype
    per_token = bytes_per_token(model.config, dtype)
    return (
        f"{count:,} parameters beside the target's ({size_mib:,.1f} MiB as {str(dtype).removeprefix('torch.')}), "
        f"draft K/V {per_token:,} bytes per token"
    )


def _read_target_config(target_dir: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(target_dir)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{target_dir}: transformers cannot read this as a target ({error})") from error


def _dtype(target: Any) -> torch.dtype:
    """Return what the server computes in unless --dtype says otherwise, and with it the drafter."""
    import torch

    dtype = target.dtype
    # SGLang's `--dtype auto` serves float32 checkpoints in float16, where the size is the same as in bfloat16.
    return dtype if dtype in (torch.float16, torch.bfloat16) else torch.bfloat16


def _check_finite(model: DraftModel) -> None:
    import torch

    broken = [name for name, parameter in model.named_parameters() if not bool(torch.isfinite(parameter).all())]
    if broken:
        raise CheckpointError(
            f"{model.config.origin}: NaN or infinite values in {', '.join(broken)}; take an intact checkpoint"
        )


def _bind(model: DraftModel, target_dir: Path, target: Any) -> tuple[str, ...]:
    """Let ``model`` read what it can of the target; returns the names of the tensors."""
    from sglang_dspark.draft.pairing import lacks_own
    from sglang_dspark.draft.target_files import quantised_layers

    quantised = quantised_layers(target_dir, tied=target.tie_word_embeddings)
    for layer in quantised:
        if getattr(model, layer) is None:
            raise lacks_own(model.config, layer, "is quantised")
    weights = dict(zip(("embed_tokens", "lm_head"), _read_target_embeddings(target_dir), strict=True))
    # In the server's dtype: a float32 embedding equals the drafter's copy only after the same rounding.
    return model.bind_target(
        *(None if layer in quantised else weight.to(_dtype(target)) for layer, weight in weights.items())
    )


def _read_target_embeddings(target_dir: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """``(embedding, LM head)`` of the target, each ``[V, d]``; the same tensor twice where they are tied."""
    from safetensors import SafetensorError, safe_open

    from sglang_dspark.draft.target_files import PREFIXES

    layers = {f"{prefix}weight": layer for layer, prefixes in PREFIXES.items() for prefix in prefixes}
    found = {}
    for file in sorted(target_dir.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in layers.keys() & set(tensors.keys()):
                    found[layers[name]] = tensors.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file}: cannot be read ({error}); download the target again") from error
    if "embed_tokens" not in found:
        raise CheckpointError(
            f"{target_dir}: no safetensors file holds {PREFIXES['embed_tokens'][0]}weight; give a complete target as "
            "safetensors"
        )
    # The head is absent where it is tied to the embedding.
    return found["embed_tokens"], found.get("lm_head", found["embed_tokens"])


def check_golden(target_dir: Path, draft_dir: Path, golden_dir: Path) -> Iterator[Finding]:
    """Replay golden vectors through the model code; one finding per mismatch."""
    from transformers.utils.logging import disable_progress_bar

    from sglang_dspark.tools.golden import replay

    disable_progress_bar()
    try:
        report = replay(target_dir, draft_dir, golden_dir)
    except DSparkError as error:
        yield Finding("fail", "golden", str(error))
        return
    yield Finding("ok" if report.ok else "fail", "golden", _summary(report))
    for mismatch in report.mismatches:
        yield Finding("fail", "golden", str(mismatch))


def _summary(report: GoldenReport) -> str:
    text = f"{sum(report.checked.values())} comparisons, {len(report.mismatches)} mismatches"
    if report.accept_lengths:
        text += f"; accept length {sum(report.accept_lengths) / len(report.accept_lengths):.2f}"
    if report.max_abs_error:
        path, error = max(report.max_abs_error.items(), key=lambda entry: entry[1])
        text += f"; largest difference {error:.1e} ({path})"
    return text
