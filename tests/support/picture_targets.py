"""Tiny targets that read pictures, with the processor of their family, and what transformers says of prompts."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from byte_tokenizer import save_byte_tokenizer
from family_targets import COMMON, write_target
from PIL import Image

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
    """Return the greedy continuation of a prompt, which goes on behind the mark of an end."""
    inputs = processor(text=[text], images=list(images) or None, return_tensors="pt")
    length = inputs["input_ids"].shape[1]
    whole = model.generate(**inputs, max_new_tokens=num_tokens, do_sample=False)
    return whole[0, length:].tolist()


def picture_target(architecture: str, folder: Path) -> Path:
    """Return ``folder``, with a target and its processor in it."""
    write_picture_target(architecture, folder)
    return folder
