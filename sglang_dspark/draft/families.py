"""Families of targets: which are served, how their hidden states are returned, and why others are refused.

One list, for the checks at start-up, for the seam to SGLang and for the table in docs/compatibility.md.
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
        models: published models of this class.
        capture: the method of SGLang's class that is told which layers' outputs to return: ``dflash`` is
            ``set_dflash_layers_to_capture``; ``eagle3`` is ``set_eagle3_layers_to_capture``, for classes that lack it.
        text: path of the model that reads text inside SGLang's class, if that one also reads images and leaves
            everything about text to it.
        reads_images: the class also reads images; prompts may hold them, but no video and no sound.
        embedding: path of the embedding, if the class has no ``get_input_embeddings``.
        recurrent: some of its layers keep a recurrent state, those of gated delta nets.
        remark: what users of the family should know.
    """

    architecture: str
    models: str
    capture: Literal["dflash", "eagle3"] = "dflash"
    text: str = ""
    reads_images: bool = False
    embedding: str = ""
    recurrent: bool = False
    remark: str = ""


_NO_WINDOW = "a `sliding_window` has no effect, as in SGLang"
_IMAGES = "text and images"
_NO_GPU = "not yet run on a GPU"
_NO_CPU = "refused on a CPU"
_IN_PROCESS = "a tiny one on an H200 in one process"
_BY_TRITON = f"{_NO_CPU}; `--attention-backend triton`"

FAMILIES: tuple[Family, ...] = (
    Family("LlamaForCausalLM", "Llama 2 and 3, SmolLM2"),
    Family("Qwen3ForCausalLM", "Qwen3"),
    Family("Qwen3MoeForCausalLM", "Qwen3-30B-A3B, Qwen3-Coder-30B-A3B, Qwen3-235B-A22B"),
    Family("MistralForCausalLM", "Mistral 7B, Mistral Nemo, Mistral Small 3", remark=_NO_WINDOW),
    Family("Ministral3ForCausalLM", "Ministral 3", remark=_NO_WINDOW),
    Family(
        "Phi3ForCausalLM",
        "Phi-3, Phi-4, Phi-4-mini",
        remark=f"{_NO_WINDOW}; with LongRoPE, as long as the context length is that of its short factors",
    ),
    Family("InternLM3ForCausalLM", "InternLM 3"),
    Family("Qwen2ForCausalLM", "Qwen2, Qwen2.5, QwQ", capture="eagle3"),
    Family("Glm4MoeForCausalLM", "GLM-4.5, GLM-4.5-Air, GLM-4.6", capture="eagle3"),
    Family("ApertusForCausalLM", "Apertus", capture="eagle3"),
    Family("Qwen2MoeForCausalLM", "Qwen1.5-MoE, Qwen2-57B-A14B", capture="eagle3", embedding="model.embed_tokens"),
    Family(
        "GptOssForCausalLM",
        "gpt-oss-20b, gpt-oss-120b",
        remark=f"{_IN_PROCESS}; {_NO_CPU}; `--attention-backend fa3` or `triton`",
    ),
    Family(
        "Mistral3ForConditionalGeneration",
        "Mistral Small 3.1 and 3.2, Ministral 3 with images",
        text="language_model",
        reads_images=True,
        remark=_IMAGES,
    ),
    Family("Qwen2_5_VLForConditionalGeneration", "Qwen2.5-VL", capture="eagle3", reads_images=True, remark=_IMAGES),
    Family("Qwen3VLForConditionalGeneration", "Qwen3-VL", capture="eagle3", reads_images=True, remark=_IMAGES),
    Family(
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3-VL-30B-A3B, Qwen3-VL-235B-A22B",
        reads_images=True,
        remark=_IMAGES,
    ),
    Family(
        "Gemma4ForConditionalGeneration",
        "Gemma 4 31B, 26B-A4B, E4B, E2B",
        reads_images=True,
        remark=f"{_IMAGES}; {_IN_PROCESS}, text alone and without experts; {_BY_TRITON}",
    ),
    Family(
        "Gemma4UnifiedForConditionalGeneration",
        "Gemma 4 12B",
        reads_images=True,
        remark=f"{_IMAGES}; {_NO_GPU}; {_BY_TRITON}",
    ),
    Family(
        "Qwen3_5ForCausalLM", "Qwen3.5 to 3.8, text", recurrent=True, remark="a tiny one behind a server on an H200"
    ),
    Family(
        "Qwen3_5ForConditionalGeneration",
        "Qwen3.5, 3.6 and 3.8, dense",
        reads_images=True,
        recurrent=True,
        remark=f"{_IMAGES}; {_NO_GPU}",
    ),
    Family(
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen3.5-35B-A3B, Qwen3.6-35B-A3B",
        reads_images=True,
        recurrent=True,
        remark=f"{_IMAGES}; {_NO_GPU}",
    ),
    Family("Qwen3_5MoeForCausalLM", "Qwen3.8-2.4T, text", recurrent=True, remark=_NO_GPU),
    Family("Qwen3NextForCausalLM", "Qwen3-Next, Qwen3-Coder-Next", recurrent=True, remark=_NO_GPU),
)


_RECURRENT = "its layers keep a recurrent state of a kind that is not served"
_LATENT = "its attention is latent (MLA)"

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
        "SGLang returns states of its layers that are not summed up, from which drafts would hardly ever be right",
    ),
    "Gemma4ForCausalLM": "SGLang does not read the sizes of its heads; serve it as Gemma4ForConditionalGeneration",
    **dict.fromkeys(
        ("Llama4ForConditionalGeneration", "Llama4ForCausalLM"),
        "three of every four layers see only a chunk of the context, and verification would show them all of it",
    ),
}
"""Architectures that no DSPARK serves, SGLang's own neither, and why."""

_UNKNOWN = (
    "this plugin does not know it. SGLang's own DSPARK may serve it on a GPU, with a drafter for it: "
    "--speculative-dspark-engine auto or builtin"
)


def is_left_to_sglang(architectures: Sequence[str] | None) -> bool:
    """Return whether our worker leaves a target to SGLang's own DSPARK, which may know its architecture."""
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
