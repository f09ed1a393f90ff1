"""Recognition of a checkpoint's format by its content: formats share the names of architectures."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, Literal

from sglang_dspark.draft.config import ARCHITECTURES
from sglang_dspark.draft.families import FAMILIES
from sglang_dspark.errors import CheckpointError

FormatName = Literal["DeepSpec", "SpecForge", "ModelOpt", "speculators", "TorchSpec", "DFlash"]

SERVED = (
    "formats that load are DeepSpec (also NeMo and Ling), SpecForge, ModelOpt, speculators (dspark and dflash), DFlash "
    "and TorchSpec, of drafters with Qwen3 layers, and DeepSpec with Gemma 4's"
)

_TARGETS = {family.architecture for family in FAMILIES}
_DEEPSPEC = {*ARCHITECTURES.values(), "LingDSparkModel", "Qwen3OmniDSparkModel"}

_SERVED_CLASSES = {
    *_DEEPSPEC,
    *("DSparkDraftModel", "DSparkSpeculator", "Lfm2DSparkDraftModel", "DFlashDraftModel", "DFlashSpeculator"),
}
"""Architectures with Qwen3's layers, or Gemma 4's. The layers of any other may differ in what no tensor shows."""
_OF_DRAFTERS = re.compile("DSpark|DFlash|Draft|Speculator|Eagle", re.IGNORECASE)

_OWN_CLASSES = {
    "K3DSparkModel": "its attention is latent (MLA)",
    "KimiK3DSparkModel": "its attention is latent (MLA)",
    "DeepseekV4DSparkModel": "its layers are DeepSeek V4's",
    "DeepSeekV4DSparkModel": "its layers are DeepSeek V4's",
    "DeepseekV4ForCausalLMDSpark": "its layers are DeepSeek V4's",
    "DSparkV41DraftModel": "its layers are DeepSeek V4.1's",
    "Glm5_2DSparkModel": "its layers are GLM 5.2's",
    "MiniMaxM3DSparkModel": "its layers are MiniMax M3's",
    "DSparkMiniMaxDraftModel": "its layers are MiniMax M3's",
    "MiniMaxDFlash2DraftModel": "it has the convolutions and the candidate selector of DFlash2",
    "MuseSparkDSparkModel": "its layers are Muse Spark's",
    "MuseGlimmerAssistantModel": "its layers are Muse Glimmer's",
    "DFlashLagunaForCausalLM": "its layers are Laguna's",
    "DFlash2DraftModel": "it has the convolutions and the candidate selector of DFlash2",
    "DFlash2BeamDraftModel": "it has the convolutions and the candidate selector of DFlash2",
    "LiLiCorrDraftModel": "it has the candidate corrector of LiLiCorr",
    "DFlashLinearDraftModel": "its attention is linear",
    "Eagle3DraftModel": "it is an EAGLE-3 drafter",
    "LlamaForCausalLMEagle3": "it is an EAGLE-3 drafter",
}
"""Architectures with networks of their own, and what is different in them."""

_UNKNOWN_CLASS = (
    "its layers may be its own, and then drafts are poor. If they are those of a class that loads, name that class in "
    "architectures, such as DFlashDraftModel, and leave auto_map out"
)

_SPECULATORS_KINDS = {
    "dflash2": "it has the convolutions and the candidate selector of DFlash2",
    "xpress": "it has the refiner of XPress",
    "eagle3": "it is an EAGLE-3 drafter",
    "peagle": "it is a P-EAGLE drafter",
    "mtp": "it is a multi-token-prediction module",
}


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
    _refuse_other_networks(config, dflash, tensors, origin)
    if config.get("speculators_model_type") is not None:
        return "speculators"
    names = _architectures(config)
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
    if names & {"DFlashDraftModel", "DFlashSpeculator"} and (
        dflash or {"block_size", "mask_token_id"} <= config.keys()
    ):
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
    return {name for name in names if name in _OWN_CLASSES or _OF_DRAFTERS.search(name)}


def _is_modelopt(dflash: Mapping[str, Any], tensors: Collection[str]) -> bool:
    return "markov_w1.weight" in tensors or bool(dflash.keys() & {"use_confidence_head", "shift_label"})


def _refuse_other_networks(
    config: Mapping[str, Any], dflash: Mapping[str, Any], tensors: Collection[str], origin: str
) -> None:
    """Raise for everything that only resembles the network that is served."""

    def refuse(what: str, reason: str) -> CheckpointError:
        return CheckpointError(f"{origin}: {what} is not supported: {reason}; {SERVED}")

    kind = config.get("speculators_model_type")
    if kind not in (None, "dspark", "dflash"):
        raise refuse(f"speculators_model_type={kind!r}", _SPECULATORS_KINDS.get(str(kind), "its network is not known"))
    if config.get("model_type") == "k3_dspark":
        raise refuse("model_type='k3_dspark'", _OWN_CLASSES["K3DSparkModel"])
    if "dspark_target_layer_ids" in config or any(name.startswith("mtp.") for name in tensors):
        raise refuse("a drafter inside its target", "its layers are DeepSeek V4's")
    for key, names in (("architectures", _architectures(config)), ("auto_map", _remote_classes(config))):
        for name in sorted(names - _SERVED_CLASSES):
            unknown = "it is a target, not a drafter" if name in _TARGETS else _UNKNOWN_CLASS
            raise refuse(f"{key}: {name}", _OWN_CLASSES.get(name, unknown))
    keys = config.keys() | dflash.keys()
    if any(key.startswith("lilicorr_") for key in keys):
        raise refuse("lilicorr_*", _OWN_CLASSES["LiLiCorrDraftModel"])
    if keys & {"conv_kernel_size", "selector_rank"}:
        raise refuse("selector_rank", _OWN_CLASSES["DFlash2DraftModel"])
    if dflash.get("projector_type") == "domino" or any(name.startswith("prefix_gru.") for name in tensors):
        raise refuse("projector_type='domino'", "it has the recurrent head of Domino")
    if any(name.startswith(("xpress_head.", "refiner_head.")) for name in tensors):
        raise refuse("refiner_head", "it has the refiner of XPress")
