"""Families of targets: which are served, how their hidden states are returned, and why others are refused.

One list, for the checks at start-up, for the seam to SGLang and for the table in docs/compatibility.md.
"""

from collections.abc import Sequence
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


@dataclass(frozen=True)
class Unserved:
    """Targets that DSPARK does not serve.

    Attributes:
        names: of their architectures, as config.json has them, separated by spaces.
        models: published models of these classes.
        reason: what is missing for them.
        instead: how they are served.
        own_dspark: how SGLang's own worker may verify them, with a drafter for them: ``by request`` if its layers take
            other numbers of rows for each request, otherwise ``alike``. None if it does not know them.
    """

    names: str
    models: str
    reason: str
    instead: str
    own_dspark: Literal["by request", "alike"] | None = None

    @property
    def architectures(self) -> list[str]:
        """Return the names one by one."""
        return self.names.split()


_STATE = "its layers of {} keep a recurrent state"
_KDA, _MAMBA2 = _STATE.format("Kimi delta attention (KDA)"), _STATE.format("Mamba 2")
_CONVOLUTIONS = _STATE.format("short convolutions")
_LATENT = "its attention is latent (MLA)"

_DFLASH, _EAGLE3, _EAGLE, _OWN_LAYER, _NGRAM = (
    f"SGLang's own --speculative-algorithm {name} serves it {how}"
    for name, how in (
        ("DFLASH", "with a DFlash drafter"),
        ("EAGLE3", "with an EAGLE-3 drafter"),
        ("EAGLE", "with an EAGLE drafter"),
        ("EAGLE", "with the draft layer of its own checkpoint"),
        ("NGRAM", "without a drafter"),
    )
)
_OWN_DSPARK = (
    "SGLang's own worker may serve it on a GPU, with a drafter for it: --speculative-dspark-engine auto or builtin"
)

UNSERVED: tuple[Unserved, ...] = (
    Unserved(
        "InternS2PreviewForConditionalGeneration Qwen4ExpForConditionalGeneration",
        "Intern-S2 preview, Qwen4 preview",
        "its gated delta nets have not been tried",
        _DFLASH,
        own_dspark="alike",
    ),
    Unserved(
        "KimiLinearForCausalLM KimiK3ForConditionalGeneration KimiK3LinearForCausalLM BailingMoeV3ForCausalLM",
        "Kimi Linear, Kimi K3, Ling 3",
        _KDA,
        _NGRAM,
        own_dspark="by request",
    ),
    Unserved("Glm5NextForConditionalGeneration", "GLM-5 Next", _KDA, _NGRAM, own_dspark="alike"),
    Unserved("NemotronHForCausalLM NemotronHPuzzleForCausalLM", "Nemotron-H", _MAMBA2, _NGRAM, own_dspark="alike"),
    Unserved("FalconH1ForCausalLM GraniteMoeHybridForCausalLM", "Falcon-H1, Granite 4 hybrids", _MAMBA2, _NGRAM),
    Unserved(
        "Lfm2ForCausalLM Lfm2MoeForCausalLM Lfm2VlForConditionalGeneration",
        "LFM2",
        _CONVOLUTIONS,
        _NGRAM,
        own_dspark="alike",
    ),
    Unserved("InklingForConditionalGeneration", "Inkling", _CONVOLUTIONS, _NGRAM, own_dspark="alike"),
    Unserved("ZayaForCausalLM", "Zaya", _STATE.format("convolutions before attention"), _NGRAM),
    Unserved("BailingMoeV2_5ForCausalLM", "Ling 2.5", _STATE.format("lightning attention"), _NGRAM),
    Unserved(
        "JetNemotronForCausalLM", "Jet-Nemotron", _STATE.format("gated delta nets with dynamic convolutions"), _NGRAM
    ),
    Unserved(
        "DeepseekV3ForCausalLM DeepseekV4ForCausalLM Glm4MoeLiteForCausalLM",
        "DeepSeek V3 and V4, Kimi K2, GLM-4.7-Flash",
        _LATENT,
        _OWN_LAYER,
        own_dspark="by request",
    ),
    Unserved(
        "DeepseekV32ForCausalLM GlmMoeDsaForCausalLM", "DeepSeek V3.2, GLM-5", _LATENT, _OWN_LAYER, own_dspark="alike"
    ),
    Unserved("LongcatFlashForCausalLM", "LongCat-Flash", _LATENT, _OWN_LAYER),
    Unserved(
        "DeepseekV2ForCausalLM KimiK25ForConditionalGeneration",
        "DeepSeek V2, Kimi K2.5",
        _LATENT,
        _EAGLE3,
        own_dspark="by request",
    ),
    Unserved("MistralLarge3ForCausalLM", "Mistral Large 3", _LATENT, _EAGLE, own_dspark="by request"),
    Unserved("KimiVLForConditionalGeneration MiniCPM3ForCausalLM", "Kimi-VL, MiniCPM 3", _LATENT, _NGRAM),
    Unserved(
        "Gemma3ForCausalLM Gemma3ForConditionalGeneration",
        "Gemma 3",
        "SGLang returns hidden states of its layers that are not summed up, from which drafts would hardly ever be "
        "right",
        "serve it without --speculative-algorithm",
    ),
    Unserved(
        "Gemma4ForCausalLM",
        "Gemma 4 without the wrapper for images",
        "without the wrapper for images SGLang does not read the sizes of its heads",
        "serve a checkpoint of Gemma4ForConditionalGeneration",
    ),
    Unserved(
        "LagunaForCausalLM",
        "Laguna",
        "its layers have unequal numbers of heads, with which verification is not tried yet",
        _EAGLE3,
        own_dspark="by request",
    ),
    Unserved(
        "Llama4ForConditionalGeneration Llama4ForCausalLM",
        "Llama 4",
        "three of every four layers see only a chunk of the context, and verification would show them all of it",
        _EAGLE3,
    ),
)


def left_to_sglang(architectures: Sequence[str] | None) -> str | None:
    """Return why a target is left to SGLang's own worker; None if ours serves it, or SGLang's does not either."""
    names = set(architectures or ())
    if any(family.architecture in names for family in FAMILIES):
        return None
    for unserved in UNSERVED:
        if names & set(unserved.architectures):
            return unserved.reason if unserved.own_dspark else None
    return "this plugin does not know its architecture"


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
    for unserved in UNSERVED:
        if set(unserved.architectures) & set(names):
            raise UnservedError(
                f"--model-path: target architecture {names} is not served with DSPARK: {unserved.reason}; "
                f"{unserved.instead}{f', and {_OWN_DSPARK}' if unserved.own_dspark else ''}"
            )
    raise UnservedError(
        f"--model-path: target architecture {names} is not served with DSPARK; "
        f"served are {', '.join(family.architecture for family in FAMILIES)}; perhaps {_OWN_DSPARK}"
    )
