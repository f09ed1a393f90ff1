"""Families of targets: which are served, how their hidden states are returned, and why others are refused.

One list, for the checks at start-up and for the seam to SGLang.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from sglang_dspark.errors import UnservedError


@dataclass(frozen=True)
class Family:
    """One class of targets that is served.

    Attributes:
        architecture: as config.json names it, and SGLang's class.
        capture: the method of SGLang's class that is told which layers' outputs to return: ``dflash`` is
            ``set_dflash_layers_to_capture``; ``eagle3`` is ``set_eagle3_layers_to_capture``, for classes that lack it.
        text: path of the model that reads text inside SGLang's class, if that one also reads images and leaves
            everything about text to it.
        reads_images: the class also reads images; prompts may hold them, but no video and no sound.
        embedding: path of the embedding, if the class has no ``get_input_embeddings``.
        recurrent: some of its layers keep a recurrent state, those of gated delta nets.
    """

    architecture: str
    capture: Literal["dflash", "eagle3"] = "dflash"
    text: str = ""
    reads_images: bool = False
    embedding: str = ""
    recurrent: bool = False


FAMILIES: tuple[Family, ...] = (
    Family("LlamaForCausalLM"),
    Family("Qwen3ForCausalLM"),
    Family("Qwen3MoeForCausalLM"),
    Family("MistralForCausalLM"),
    Family("Ministral3ForCausalLM"),
    Family("Phi3ForCausalLM"),
    Family("InternLM3ForCausalLM"),
    Family("Qwen2ForCausalLM", capture="eagle3"),
    Family("Glm4MoeForCausalLM", capture="eagle3"),
    Family("ApertusForCausalLM", capture="eagle3"),
    Family("Qwen2MoeForCausalLM", capture="eagle3", embedding="model.embed_tokens"),
    Family("GptOssForCausalLM"),
    Family("Mistral3ForConditionalGeneration", text="language_model", reads_images=True),
    Family("Qwen2_5_VLForConditionalGeneration", capture="eagle3", reads_images=True),
    Family("Qwen3VLForConditionalGeneration", capture="eagle3", reads_images=True),
    Family("Qwen3VLMoeForConditionalGeneration", reads_images=True),
    Family("Gemma4ForConditionalGeneration", reads_images=True),
    Family("Gemma4UnifiedForConditionalGeneration", reads_images=True),
    Family("Qwen3_5ForCausalLM", recurrent=True),
    Family("Qwen3_5ForConditionalGeneration", reads_images=True, recurrent=True),
    Family("Qwen3_5MoeForConditionalGeneration", reads_images=True, recurrent=True),
    Family("Qwen3_5MoeForCausalLM", recurrent=True),
    Family("Qwen3NextForCausalLM", recurrent=True),
)
"""The classes; docs/compatibility.md has published models of each, and how it was tried."""

_RECURRENT = "the target's layers keep a recurrent state of a kind that DSPARK does not serve"
_LATENT = "the target's attention is latent (MLA)"

UNSERVED: Mapping[str, str] = {
    "FalconH1ForCausalLM": _RECURRENT,
    "GraniteMoeHybridForCausalLM": _RECURRENT,
    "ZayaForCausalLM": _RECURRENT,
    "BailingMoeV2_5ForCausalLM": _RECURRENT,
    "JetNemotronForCausalLM": _RECURRENT,
    "LongcatFlashForCausalLM": _LATENT,
    "KimiVLForConditionalGeneration": _LATENT,
    "MiniCPM3ForCausalLM": _LATENT,
    **dict.fromkeys(
        ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        "SGLang returns the hidden states of this target's layers without the residual, so hardly any draft would be "
        "right",
    ),
    "Gemma4ForCausalLM": "SGLang does not read the sizes of this class's attention heads; serve the model as "
    "Gemma4ForConditionalGeneration",
    **dict.fromkeys(
        ("Llama4ForConditionalGeneration", "Llama4ForCausalLM"),
        "three of four layers attend only to one chunk of the context, but verification would let them attend to all "
        "of it",
    ),
}
"""Architectures that no DSPARK serves, SGLang's own neither, and why."""

_UNKNOWN = (
    "this plugin does not know it. SGLang's own worker may serve it on a GPU, with a drafter for it: "
    "--speculative-dspark-engine auto leaves it to that one, scheduled has the plugin's policies decide there"
)


def is_left_to_sglang(architectures: Sequence[str] | None) -> bool:
    """Return whether our worker leaves a target to SGLang's own worker, which may know its architecture."""
    names = set(architectures or ())
    return not names & {*UNSERVED, *(family.architecture for family in FAMILIES)}


def family_of(architectures: Sequence[str] | None) -> Family:
    """Return the family of a target.

    Args:
        architectures: of its config.json.

    Raises:
        UnservedError: it is not served.
    """
    names = list(architectures or ())
    for family in FAMILIES:
        if family.architecture in names:
            return family
    reason = next((UNSERVED[name] for name in names if name in UNSERVED), _UNKNOWN)
    raise UnservedError(f"--model-path: target architecture {names} is not served with DSPARK: {reason}")
