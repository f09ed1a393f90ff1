"""Makes tiny targets of many families with random weights, and says what transformers makes of texts.

No code of ours is in it. Weights are spread so widely that next to no two logits, and no two experts' scores, are
close.
"""

from __future__ import annotations

import base64
import io
import json
import random
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from golden_server import CASES, golden_target
from letter_tokenizers import save_byte_tokenizer
from PIL import Image
from safetensors.torch import load_file, save_file

COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,  # not the hidden size by the heads
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
GEMMA4_EXPERTS = "Gemma 4 with experts"


@dataclass(frozen=True)
class Tiny:
    """Class, configuration and weights of a tiny target, see ``data/family_targets.toml``."""

    model: str
    seed: int
    config: Mapping[str, Any]
    written: Mapping[str, Any] = field(default_factory=dict)
    chosen: int = 0
    vision: Mapping[str, Any] | None = None
    router_std: float = 1.0
    transposed: bool = False
    suppressed: tuple[int, ...] = ()


def _tables() -> dict[str, Tiny]:
    tables = tomllib.loads((Path(__file__).parents[1] / "data" / "family_targets.toml").read_text())
    parts = tables.pop("parts")

    def tiny(name: str, table: dict[str, Any]) -> Tiny:
        config = {key: value for part in table.pop("parts", ()) for key, value in parts[part].items()}
        if rope := table.pop("rope", None):
            config["rope_parameters"] = rope
        config |= {key: None if value == "none" else value for key, value in table.pop("config", {}).items()}
        if vision := table.get("vision"):
            table["vision"] = parts.get(vision.pop("part", ""), {}) | vision
        return Tiny(**{"model": name} | table, config=config)

    return {name: tiny(name, table) for name, table in tables.items()}


TINY = _tables()

_ROUTER_WEIGHTS = ("gate.weight", "router.weight", "router.proj.weight")

NUM_TOKENS = 20
"""Of the greedy continuations of ``PROMPTS``."""


def _prompts() -> list[list[int]]:
    draw = random.Random(5)
    return [draw.choices(range(2, COMMON["vocab_size"]), k=length) for length in (3, 17, 40)]


PROMPTS = _prompts()


def write_target(architecture: str, folder: Path) -> Any:
    """Write one of ``TINY`` into ``folder``, and return the model of transformers, float32."""
    tiny = TINY[architecture]
    cls = getattr(transformers, tiny.model)
    text = {**COMMON, **tiny.config}
    parts = text if tiny.vision is None else {"text_config": text, "vision_config": dict(tiny.vision)}
    tied = {"tie_word_embeddings": text["tie_word_embeddings"]}
    config = cls.config_class(**parts, **({} if tiny.vision is None else tied))
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(tiny.seed)
    model = cls(config).float().eval()
    _draw(model, tiny, text["hidden_size"])
    model.save_pretrained(folder)
    if tiny.transposed:
        _transpose_experts(folder / "model.safetensors")
    file = folder / "config.json"
    # SGLang makes some layers in this format, whatever --dtype says.
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dtype": dtype} | dict(tiny.written)))
    if tiny.suppressed:
        model.register_forward_hook(lambda module, given, output: _suppress(output.logits, tiny.suppressed))
    return model


def _suppress(logits: torch.Tensor, tokens: Sequence[int]) -> None:
    logits[..., list(tokens)] = torch.finfo(logits.dtype).min


@torch.no_grad()
def _draw(model: Any, tiny: Tiny, hidden_size: int) -> None:
    """Draw the weights and buffers of a model."""
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            parameter.normal_(std=2.0).copy_(parameter.bfloat16())  # what SGLang keeps of them
        elif name.endswith("router.scale"):
            parameter.fill_(hidden_size**0.5)  # its factor becomes 1: SGLang leaves it out on a CPU
        elif name.endswith("A_log"):
            parameter.uniform_(-2.0, 0.5)  # some heads remember long, some do not
        elif name.endswith("conv1d.weight"):
            parameter.normal_(std=0.5)
        elif parameter.ndim == 1:
            parameter.normal_(mean=0.0 if name.endswith("bias") else 1.0, std=0.3)
        else:
            parameter.normal_(std=tiny.router_std if name.endswith(_ROUTER_WEIGHTS) else 0.15)
    for module in model.modules():
        if type(module).__name__ == "XIELUActivation":  # computed in 16 bits everywhere
            module.bfloat16()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.3)
        elif name.endswith("layer_scalar"):
            buffer.normal_(mean=1.0, std=0.3)


def _transpose_experts(file: Path) -> None:
    tensors = load_file(file)
    experts = {name: tensor.transpose(1, 2).contiguous() for name, tensor in tensors.items() if ".experts." in name}
    save_file(tensors | experts, file, metadata={"format": "pt"})


def written_target(architecture: str, folder: Path) -> Path:
    """Return ``folder``, with one of ``TINY`` in it."""
    write_target(architecture, folder)
    return folder


@torch.no_grad()
def continued(model: Any, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Return ``prompt`` and its greedy continuation, every token from a forward over the whole text."""
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids


@torch.no_grad()
def outputs_of(model: Any, ids: Sequence[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return logits [n, V] and hidden states [n, d]: of the embedding, and of every layer but the last one."""
    output = model(torch.tensor([ids]), use_cache=False, output_hidden_states=True)
    return output.logits[0], [state[0] for state in output.hidden_states[:-1]]


QWEN = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}
"""What Qwen's prompts have around pictures and in their place, by the fields of config.json that say so."""
PIXTRAL = {"image_token_index": "[IMG]", "image_break_token_id": "[IMG_BREAK]", "image_end_token_id": "[IMG_END]"}
GEMMA = {
    "boi_token_id": "<|image>",
    "image_token_id": "<|image|>",
    "eoi_token_id": "<image|>",
    "boa_token_id": "<|audio>",
    "audio_token_id": "<|audio|>",
    "eoa_token_index": "<audio|>",
    "video_token_id": "<|video|>",
}
CHAT = (
    "{% for message in messages %}{{ message.role[0] }}:"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}PLACE{% endif %}{% endfor %}{% endif %}"
    ";{% endfor %}a:"
)


def place(architecture: str) -> str:
    """Return what stands for a picture in prompts of a target."""
    places = {PIXTRAL["image_token_index"]: "Mistral", GEMMA["image_token_id"]: "Gemma"}
    found = (mark for mark, family in places.items() if family in architecture)
    return next(found, "<|vision_start|><|image_pad|><|vision_end|>")


def _marks(architecture: str) -> dict[str, str]:
    return PIXTRAL if "Mistral" in architecture else GEMMA if "Gemma" in architecture else QWEN


def write_picture_target(architecture: str, folder: Path) -> tuple[Any, Any]:
    """Write one of ``family_targets.TINY`` and its processor; return the model and the processor of transformers."""
    model = write_target(architecture, folder)
    marks = _marks(architecture)
    # The last tokens of the vocabulary.
    ids = {name: COMMON["vocab_size"] - len(marks) + i for i, name in enumerate(marks)}
    for config in (model.config, model.model.config):
        for name, token in ids.items():
            setattr(config, name, token)
    model.generation_config.eos_token_id = None
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | ids))
    named = {name.removesuffix("_id").replace("_index", ""): mark for name, mark in marks.items()}
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        save_byte_tokenizer(folder, marks=tuple(marks.values())),
        **({"extra_special_tokens": named} if marks is GEMMA else {}),
    )
    processor = _processor(architecture, model.config, tokenizer)
    processor.chat_template = CHAT.replace("PLACE", place(architecture))
    processor.save_pretrained(folder)
    return model, processor


def _processor(architecture: str, config: Any, tokenizer: Any) -> Any:
    vision = config.vision_config
    if "Mistral" in architecture:
        image_processor = transformers.PixtralImageProcessor(
            size={"longest_edge": vision.image_size}, patch_size=vision.patch_size
        )
        merged = config.spatial_merge_size
        return transformers.PixtralProcessor(
            image_processor, tokenizer, patch_size=vision.patch_size, spatial_merge_size=merged
        )
    if "Gemma" in architecture:
        kind = "Gemma4Unified" if "Unified" in architecture else "Gemma4"
        patches = {"patch_size": vision.patch_size, "pooling_kernel_size": vision.pooling_kernel_size}
        return getattr(transformers, f"{kind}Processor")(
            getattr(transformers, f"{kind}AudioFeatureExtractor")(),
            getattr(transformers, f"{kind}ImageProcessor")(**patches, max_soft_tokens=70),
            tokenizer,
            getattr(transformers, f"{kind}VideoProcessor")(**patches, max_soft_tokens=70),
        )
    sizes = {
        "patch_size": vision.patch_size,
        "merge_size": vision.spatial_merge_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "size": {"shortest_edge": 28 * 28, "longest_edge": 64 * 28 * 28},
    }
    of_family = transformers.Qwen2_5_VLProcessor if "2_5" in architecture else transformers.Qwen3VLProcessor
    of_videos = transformers.Qwen2VLVideoProcessor()  # transformers makes no processor without
    return of_family(transformers.Qwen2VLImageProcessor(**sizes), tokenizer, of_videos)


def picture(seed: int, width: int, height: int) -> Image.Image:
    """Return a picture of coloured noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def data_url(image: Image.Image) -> str:
    """Return a PNG as clients send it."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


@torch.no_grad()
def continued_after_pictures(
    model: Any, processor: Any, text: str, images: Sequence[Image.Image], num_tokens: int
) -> list[int]:
    """Return the greedy continuation of a prompt, which goes on after the mark of an end."""
    inputs = processor(text=[text], images=list(images) or None, return_tensors="pt")
    length = inputs["input_ids"].shape[1]
    whole = model.generate(**inputs, max_new_tokens=num_tokens, do_sample=False)
    return whole[0, length:].tolist()


# Texts, with a place for each picture.
PICTURE_PROMPTS = (
    ("u:what is this PICTURE then;a:", (picture(1, 80, 56),)),
    ("one PICTURE two PICTURE end", (picture(1, 80, 56), picture(2, 120, 120))),
    ("just text here", ()),
    ("u:what is this PICTURE then;a:", (picture(3, 80, 56),)),
)


def behind_pictures(architecture: str, num_tokens: int, **fields: Any) -> list[dict[str, Any]]:
    """Return greedy requests of ``PICTURE_PROMPTS``, so many tokens each."""
    parameters = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
    return [
        {
            "text": text.replace("PICTURE", place(architecture)),
            "image_data": [data_url(image) for image in images] or None,
            "sampling_params": parameters,
            **fields,
        }
        for text, images in PICTURE_PROMPTS
    ]


def picture_target(architecture: str, folder: Path) -> Path:
    """Return ``folder``, with a target and its processor in it."""
    write_picture_target(architecture, folder)
    return folder


TOOL_CALL, REASONING = CASES[1]["prompt_ids"], CASES[2]["prompt_ids"]
"""Prompts: after the first the target writes a tool call, after the second a mark of two tokens, and numbers."""

END = 103
"""A token that ends texts, of which the tokenizer knows nothing; the twelfth one after `REASONING`."""

_WORDS = {
    59: "Sure",
    60: "<tool_call>\n",
    39: '{"name": "get_time',
    33: '", "arguments": ',
    13: "{}",
    21: "}",
    29: "\n</tool_call>",
    97: "</thi",
    98: "nk>",
    140: "<think>",
    141: "</think>",  # SGLang counts reasoning by a token
}
THINK_END = 141
SPOKEN_CHAT = "{% for message in messages %}{{ message.content }}{% endfor %}"


def spoken_target(folder: Path) -> Path:
    """Write it, with a chat template that is only the content; returns its folder."""
    path = golden_target(folder)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    words = {id_: word for word, id_ in tokenizer["model"]["vocab"].items()} | _WORDS
    tokenizer["model"]["vocab"] = {word: id_ for id_, word in words.items()}
    tokenizer["decoder"] = {"type": "Fuse"}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    generation = json.loads((path / "generation_config.json").read_text())
    (path / "generation_config.json").write_text(json.dumps(generation | {"eos_token_id": [1, END]}))
    (path / "chat_template.jinja").write_text(SPOKEN_CHAT)
    return path
