"""A drafter in quantised forms, written by the library of each form, and the weights that the library reads from it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.entrypoints.convert.converters import FP8BlockDequantizer
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Form:
    """A way to store weights.

    Attributes:
        config: ``quantization_config``.
        store: weight [out, in] -> its parts, by the last part of their names.
        library: parts -> the weight that the form's library reads.
        file: of the configuration.
    """

    config: Mapping[str, Any]
    store: Callable[[torch.Tensor], Tensors]
    library: Callable[[Tensors], torch.Tensor]
    file: str = field(default="config.json")


def is_quantised(name: str) -> bool:
    """Return whether the tensor of this name is a matrix of the backbone."""
    return name == "fc.weight" or name.endswith("_proj.weight")


def quantised_drafter(source: Path, folder: Path, form: str | Form) -> Tensors:
    """Write the drafter of the folder ``source`` to ``folder``; returns the tensors that it then has.

    Args:
        form: a form, or a key of :data:`FORMS`.
    """
    form = FORMS[form] if isinstance(form, str) else form
    stored: Tensors = {}
    expected: Tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if is_quantised(name):
            parts = form.store(tensor.float())
            expected[name] = form.library(parts)
            module = name.removesuffix("weight")
            stored |= {module + part: value.contiguous() for part, value in parts.items()}
            stored[f"{module}input_scale"] = torch.tensor(0.5)  # as static methods write it; inputs are not rounded
        else:
            stored[name] = expected[name] = tensor
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    if form.file == "config.json":
        config["quantization_config"] = dict(form.config)
    else:
        (folder / form.file).write_text(json.dumps(form.config))
    (folder / "config.json").write_text(json.dumps(config))
    for file in source.glob("draft_vocabulary.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    save_file(stored, folder / "model.safetensors")
    return expected


def amax(weight: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return the largest magnitude of every block; the last ones may be smaller."""
    height, width = weight.shape
    padded = torch.nn.functional.pad(weight.abs(), (0, -width % columns, 0, -height % rows))
    return padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).amax((1, 3))


def spread(scales: torch.Tensor, rows: int, columns: int, shape: torch.Size) -> torch.Tensor:
    """Return one scale for every weight."""
    return scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: shape[0], : shape[1]]


def of_hugging_face(block: tuple[int, int] | None, *, per_row: bool = False) -> Form:
    """fp8 with one scale, with one for each row, or by blocks."""

    def store(weight: torch.Tensor) -> Tensors:
        rows, columns = block or (1 if per_row else weight.shape[0], weight.shape[1])
        scales = amax(weight, rows, columns) / 448
        codes = (weight / spread(scales, rows, columns, weight.shape)).to(FP8)
        return {"weight": codes, "weight_scale_inv": scales if block or per_row else scales.reshape(())}

    def library(parts: Tensors) -> torch.Tensor:
        shape = parts["weight"].shape
        size = block or (1 if per_row else shape[0], shape[1])
        converter = FP8BlockDequantizer(targets=["x"], weight_block_size=size, dtype=torch.float32)
        scales = parts["weight_scale_inv"].reshape(-(-shape[0] // size[0]), -(-shape[1] // size[1]))
        return converter.process({"x.weight": parts["weight"], "x.weight_scale_inv": scales})["x.weight"]

    return Form({"quant_method": "fp8", "weight_block_size": list(block) if block else None}, store, library)


def of_compressed_tensors(form: str, *, inputs: Mapping[str, Any] | None = None, **weights: Any) -> Form:
    """A form of the library, whose own compressor writes it."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    scheme = QuantizationScheme(**group, format=form)
    args = scheme.weights
    compressor = BaseCompressor.get_value_from_registry(form)
    largest = {("float", 8): 448, ("float", 4): 6}.get((args.type, args.num_bits), 2 ** (args.num_bits - 1) - 1)

    def store(weight: torch.Tensor) -> Tensors:
        rows, columns = args.block_structure or (1, args.group_size or weight.shape[1])
        scales = (amax(weight, rows, columns) / largest).to(torch.bfloat16)
        parts = {"weight": weight.to(torch.bfloat16), "weight_scale": scales}
        if form.startswith("mx"):
            parts["weight_scale"] = scales.float().log2().ceil().exp2()
        if form.startswith("nvfp4"):
            parts["weight_global_scale"] = 448 * 6 / weight.abs().max().reshape(1)
            parts["weight_scale"] = (scales.float() * parts["weight_global_scale"]).to(FP8).float()
        if not args.symmetric:
            parts["weight_zero_point"] = torch.full(scales.shape, 1, dtype=torch.int8)
        return compressor.compress(parts, scheme)

    def library(parts: Tensors) -> torch.Tensor:
        if args.block_structure is None:
            return compressor.decompress(parts, scheme)["weight"]
        height, width = parts["weight"].shape
        rows, columns = args.block_structure
        padded = torch.nn.functional.pad(parts["weight"].float(), (0, -width % columns, 0, -height % rows)).to(FP8)
        return compressor.decompress(parts | {"weight": padded}, scheme)["weight"][:height, :width]

    config = {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head", "re:.*markov.*"]}
    return Form(config | {"config_groups": {"group_0": group}}, store, library)


def of_model_optimizer(algorithm: str) -> Form:
    """NVFP4 and MXFP8 by Model Optimizer, whose formulas are written out: it is no dependency."""

    def nvfp4(weight: torch.Tensor) -> Tensors:
        whole = weight.abs().max() / (6 * 448)
        scales = (amax(weight, 1, 16) / 6 / whole).to(FP8)
        levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
        relative = weight / (spread(scales.float(), 1, 16, weight.shape) * whole)
        codes = (relative.abs()[..., None] - levels).abs().argmin(-1) + 8 * (relative < 0)
        packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
        return {"weight": packed, "weight_scale": scales, "weight_scale_2": whole}

    def read_nvfp4(parts: Tensors) -> torch.Tensor:
        signed = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
        codes = torch.stack([parts["weight"] & 15, parts["weight"] >> 4], -1).flatten(1).long()
        scales = parts["weight_scale"].float() * parts["weight_scale_2"]
        return signed[codes] * spread(scales, 1, 16, codes.shape)

    def mxfp8(weight: torch.Tensor) -> Tensors:
        exponents = (amax(weight, 1, 32) / 448).log2().ceil()
        codes = (weight / spread(exponents.exp2(), 1, 32, weight.shape)).to(FP8)
        return {"weight": codes, "weight_scale": (exponents + 127).to(torch.uint8)}

    def read_mxfp8(parts: Tensors) -> torch.Tensor:
        scales = (parts["weight_scale"].float() - 127).exp2()
        return parts["weight"].float() * spread(scales, 1, 32, parts["weight"].shape)

    inner = {"quant_algo": algorithm, "exclude_modules": ["lm_head"]}
    content = {"producer": {"name": "modelopt"}, "quantization": inner}
    made = (mxfp8, read_mxfp8) if algorithm == "MXFP8" else (nvfp4, read_nvfp4)
    return Form(content, *made, "hf_quant_config.json")


_ROUNDED = {"num_bits": 8, "strategy": "token", "dynamic": True}
FORMS: Mapping[str, Form] = {
    "fp8": of_hugging_face(None),
    "fp8 by row": of_hugging_face(None, per_row=True),
    "fp8 by blocks": of_hugging_face((24, 20)),
    "float-quantized": of_compressed_tensors(
        "float-quantized", num_bits=8, type="float", strategy="channel", inputs=_ROUNDED | {"type": "float"}
    ),
    "float-quantized by blocks": of_compressed_tensors(
        "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[24, 20]
    ),
    "int-quantized": of_compressed_tensors("int-quantized", num_bits=8, strategy="channel", inputs=_ROUNDED),
    "pack-quantized": of_compressed_tensors("pack-quantized", num_bits=4, strategy="group", group_size=16),
    "pack-quantized by row": of_compressed_tensors("pack-quantized", num_bits=4, strategy="channel"),
    "pack-quantized, asymmetric": of_compressed_tensors(
        "pack-quantized", num_bits=4, strategy="group", group_size=16, symmetric=False
    ),
    "pack-quantized, 3 bits": of_compressed_tensors("pack-quantized", num_bits=3, strategy="group", group_size=16),
    "mxfp8-quantized": of_compressed_tensors(
        "mxfp8-quantized", num_bits=8, type="float", strategy="group", group_size=32, scale_dtype="torch.uint8"
    ),
    "mxfp4-pack-quantized": of_compressed_tensors(
        "mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32, scale_dtype="torch.uint8"
    ),
    "nvfp4-pack-quantized": of_compressed_tensors(
        "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16
    ),
    "NVFP4": of_model_optimizer("NVFP4"),
    "MXFP8": of_model_optimizer("MXFP8"),
}


_MODULES = {
    "fc": "fc",
    "hidden_norm": "enc.output_norm",
    "norm": "output_norm",
    "lm_head": "output",
    "embed_tokens": "token_embd",
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj",
    "markov_head.hidden_projection": "selector_hidden",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "attention_conv.kernel_projection": "attn_conv_proj",
    "mlp_conv.kernel_projection": "ffn_conv_proj",
}


def gguf_drafter(
    source: Path, file: Path, kind: str = "Q8_0", *, metadata: Mapping[str, Any] | None = None, architecture="dflash"
) -> Tensors:
    """Write the drafter of the folder ``source``, of DeepSpec's form, as llama.cpp's converter and quantiser do.

    Args:
        kind: type of the matrices of the backbone.
        metadata: keys below ``dflash`` that are added, or left out if None.

    Returns:
        The tensors that the file has.
    """
    config = json.loads((source / "config.json").read_text())
    values = {
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "block_count": config["num_hidden_layers"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "context_length": config["max_position_embeddings"],
        "rope.freq_base": config["rope_parameters"]["rope_theta"],
        "rope.dimension_count": config["head_dim"],
        "block_size": config["block_size"],
        "target_layers": [tap + 1 for tap in config["target_layer_ids"]],
        "sample_from_anchor": True,
        **(metadata or {}),
    }
    modules = dict(_MODULES)
    if config["markov_head_type"] == "selector":
        values |= {key: config[key] for key in ("conv_kernel_size", "conv_group_size", "selector_top_k")}
        values |= {"selector_rank": config["markov_rank"], "sample_from_anchor": None}
        modules |= {"markov_head.markov_w1": "selector_predecessor", "markov_head.markov_w2": "selector_successor"}
    writer = gguf.GGUFWriter(file, architecture)
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
    add[str] = writer.add_string
    for key, value in values.items():
        if value is not None:
            add[type(value)](f"{architecture}.{key}", value)
    writer.add_token_list([f"token {token}" for token in range(config["vocab_size"])])
    writer.add_mask_token_id(config["mask_token_id"])
    expected: Tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if name == "d2t":
            writer.add_tensor(name, (tensor + torch.arange(len(tensor))).numpy())
            continue
        module, _, part = name.rpartition(".")
        *_, layer, inner = ("", "", *module.removeprefix("layers.").split(".", 1)) if "layers." in module else ("", "")
        if part == "base_kernel":
            own = f"blk.{layer}.{'attn' if inner.startswith('attention') else 'ffn'}_conv_base"
        else:
            own = f"blk.{layer}.{modules[inner]}.{part}" if inner else f"{modules[module]}.{part}"
        as_type = gguf.GGMLQuantizationType[kind if is_quantised(name) else "F32"]
        codes = gguf.quantize(tensor.float().numpy(), as_type)
        expected[name] = torch.from_numpy(gguf.dequantize(codes, as_type).copy()).reshape(tensor.shape)
        if module == "confidence_head.proj" and part == "weight":
            codes = codes.reshape(-1)  # quantising drops the length 1
        writer.add_tensor(own, codes, raw_dtype=as_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected
