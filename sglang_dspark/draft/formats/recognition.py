"""Recognition of a checkpoint's format by its content: formats share the names of architectures."""

import re
from collections.abc import Collection, Mapping
from typing import Any, Literal

from sglang_dspark.draft.config import ARCHITECTURES
from sglang_dspark.draft.families import FAMILIES
from sglang_dspark.errors import CheckpointError

FormatName = Literal["DeepSpec", "SpecForge", "ModelOpt", "speculators", "TorchSpec", "DFlash", "llama.cpp"]

SERVED = (
    "formats that load are DeepSpec (also NeMo and Ling), SpecForge, ModelOpt, speculators (dspark, dflash, dflash2), "
    "DFlash and DFlash 2, TorchSpec and llama.cpp's GGUF, of drafters with Qwen3 layers, and DeepSpec with Gemma 4's"
)

_TARGETS = {family.architecture for family in FAMILIES}
_DEEPSPEC = {*ARCHITECTURES.values(), "LingDSparkModel", "Qwen3OmniDSparkModel"}
_DFLASH = {
    *("DFlashDraftModel", "DFlash2DraftModel", "DFlashSpeculator"),
    *("Qwen3DFlashDraftModel", "Qwen3DFlash2DraftModel"),  # NeMo AutoModel's
}

_SERVED_CLASSES = {*_DEEPSPEC, *_DFLASH, "DSparkDraftModel", "DSparkSpeculator", "Lfm2DSparkDraftModel"}
"""Architectures with Qwen3's layers, or Gemma 4's. The layers of any other may differ in what no tensor shows."""
_OF_DRAFTERS = re.compile("DSpark|DFlash|Draft|Speculator|Eagle|Assistant", re.IGNORECASE)

_UNKNOWN_CLASS = (
    "its layers may be its own, and then drafts are poor. If they are those of a class that loads, name that class in "
    "architectures, such as DFlashDraftModel, and leave auto_map out"
)


def recognise(config: Mapping[str, Any], tensors: Collection[str], origin: str) -> FormatName:
    """Return the format of a checkpoint.

    Args:
        config: decoded config.json.
        tensors: names in its files; empty if there are none.
        origin: the file, for messages.

    Raises:
        CheckpointError: it has none of the formats, or a network of another kind.
    """
    nested = config.get("dflash_config")
    dflash: Mapping[str, Any] = nested if isinstance(nested, Mapping) else {}
    _refuse_other_classes(config, origin)
    if config.get("speculators_model_type") is not None:
        return "speculators"
    names = _architectures(config)
    if config.get("format") == "llama.cpp":
        return "llama.cpp"
    if names & _DEEPSPEC:
        return "DeepSpec"
    if dflash.get("projector_type") == "dspark" and _is_modelopt(dflash, tensors):
        return "ModelOpt"
    if dflash.get("projector_type") == "dspark" or "Lfm2DSparkDraftModel" in names:
        return "SpecForge"
    if "DSparkDraftModel" in names and dflash:
        return "SpecForge"
    has_heads = any("markov_head." in name for name in tensors)
    if has_heads or config.keys() & {"pard_token", "dspark_markov_rank"}:
        return "TorchSpec"
    if names & _DFLASH and (dflash or {"block_size", "mask_token_id"} <= config.keys()):
        return "DFlash"
    if not names:
        raise CheckpointError(f"{origin}: key 'architectures' is missing; {SERVED}")
    raise CheckpointError(f"{origin}: architectures={config['architectures']!r} has keys of no format; {SERVED}")


def _architectures(config: Mapping[str, Any]) -> set[str]:
    names = config.get("architectures")
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()


def _remote_classes(config: Mapping[str, Any]) -> set[str]:
    """Return the classes of drafters among those that ``auto_map`` names; a target's may be left over."""
    listed = config.get("auto_map")
    items = listed.items() if isinstance(listed, Mapping) else ()
    names = {str(name).rpartition(".")[2] for key, name in items if str(key).startswith("AutoModel")}
    return {name for name in names if _OF_DRAFTERS.search(name)}


def _is_modelopt(dflash: Mapping[str, Any], tensors: Collection[str]) -> bool:
    return "markov_w1.weight" in tensors or bool(dflash.keys() & {"use_confidence_head", "shift_label"})


def _refuse_other_classes(config: Mapping[str, Any], origin: str) -> None:
    """Raise for networks that may only resemble the one that is served. What their tensors show is refused later."""
    kind = config.get("speculators_model_type")
    if kind not in (None, "dspark", "dflash", "dflash2"):
        raise CheckpointError(f"{origin}: speculators_model_type={kind!r} is not supported; {SERVED}")
    for key, names in (("architectures", _architectures(config)), ("auto_map", _remote_classes(config))):
        for name in sorted(names - _SERVED_CLASSES):
            reason = "it is a target, not a drafter" if name in _TARGETS else _UNKNOWN_CLASS
            raise CheckpointError(f"{origin}: {key}: {name} is not supported: {reason}; {SERVED}")
