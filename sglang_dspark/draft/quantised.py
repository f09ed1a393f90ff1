"""Quantised drafters: codes, scales and zero points look like the one weight that they stand for.

The configuration next to the tensors tells the scheme, so that the rest of the loader reads ordinary tensors by their
ordinary names, one at a time. Compressed-tensors and gguf, which sglang requires, compute their own forms.

Schemes: compressed-tensors as the library of this name computes it (float8, int8, int4 and other widths, NVFP4, MXFP);
fp8 as Hugging Face, SGLang and Model Optimizer store it; MXFP8; and Model Optimizer's NVFP4.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sglang_dspark.draft.stored import FLOATS, StoredTensors
from sglang_dspark.errors import CheckpointError

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationScheme


@dataclass(frozen=True)
class Storage:
    """The form of a quantised checkpoint.

    Attributes:
        words: the method, for people.
        methods: what SGLang calls it, in ``--speculative-draft-model-quantization``.
        num_quantised: weights in this form.
        num_bytes: of all tensors in the files.
    """

    words: str
    methods: frozenset[str]
    num_quantised: int
    num_bytes: int

    def dequantised(self, parameters: Iterable[Tensor]) -> str:
        """Say what loading has made of it; ``parameters`` are those of the loaded model."""
        loaded = list(parameters)
        dtype = str(max(loaded, key=Tensor.numel).dtype).removeprefix("torch.")
        size = sum(parameter.numel() * parameter.element_size() for parameter in loaded)
        return (
            f"{self.num_quantised} weights stored as {self.words}, dequantised to {dtype}: "
            f"{self.num_bytes / 2**20:,.1f} MiB in the files, {size / 2**20:,.1f} MiB loaded"
        )


PARTS = frozenset(
    "weight weight_packed weight_shape weight_scale weight_scale_inv weight_scale_2 weight_global_scale "
    "weight_zero_point weight_g_idx".split()
)
"""Last parts of the names of tensors that stand for one weight together."""
OF_INPUTS = frozenset("input_scale input_global_scale input_zero_point activation_scale".split())
"""The same of tensors that round what goes into a layer. It is not rounded here, so these are not read."""
_CACHE = "is for a quantised K/V cache, and the drafter's has the dtype of its weights; take an export without"
REFUSED = {
    "pre_quant_scale": "scales the inputs of its layer, which is not implemented; take an export without",
    **dict.fromkeys(("k_scale", "v_scale", "q_scale"), _CACHE),
}
"""The same of tensors without which the drafter would be another, and what to do."""
INSTEAD = (
    "methods that load are fp8, fbgemm_fp8, mxfp8, compressed-tensors, Model Optimizer's FP8, MXFP8 and NVFP4 without "
    "AWQ, and GGUF; take such an export, or an unquantised one"
)
AGAIN = "download the checkpoint again, or take another export of the drafter"

Parts = Mapping[str, Tensor]
"""Tensors of one module by the last part of their names."""
PartShapes = Mapping[str, Sequence[int]]
"""Their shapes. That of ``weight_shape`` is its content."""


class UnfitError(Exception):
    """Parts are missing or do not fit each other; the message names them."""


class DequantisedTensors:
    """The tensors of a quantised checkpoint, as if none were: a weight is computed when it is read.

    Attributes:
        shapes: by the names of tensors.
        storage: what is said of them.
    """

    def __init__(self, stored: StoredTensors, scheme: Scheme, origin: str) -> None:
        """Check the parts of every quantised weight.

        Raises:
            CheckpointError: some do not fit, or the drafter needs more than its weights; one message names them all.
        """
        self._stored, self._scheme, self._origin = stored, scheme, origin
        shapes, found, problems = stored.shapes, defaultdict[str, set[str]](set), list[str]()
        for name in shapes:
            module, _, part = name.rpartition(".")
            if part in REFUSED:
                problems.append(f"{name} {REFUSED[part]}")
            if part in PARTS:
                found[module].add(part)
        self._modules = {
            module: parts
            for module, parts in found.items()
            if parts != {"weight"} or stored.dtype(f"{module}.weight") not in FLOATS
        }
        self.shapes = {name: shape for name, shape in shapes.items() if not self._is_hidden(name)}
        for module, parts in sorted(self._modules.items()):
            sizes: dict[str, Sequence[int]] = {part: shapes[f"{module}.{part}"] for part in parts}
            if "weight_shape" in parts:
                sizes["weight_shape"] = stored.read(f"{module}.weight_shape").flatten().tolist()
            if "weight" in parts and stored.dtype(f"{module}.weight") in FLOATS:
                problems.append(f"{module}.weight has scales, and is not quantised itself")
                continue
            try:
                self.shapes[f"{module}.weight"] = scheme.shape(module, sizes)
            except UnfitError as problem:
                problems.append(str(problem))
        if problems:
            raise CheckpointError(f"{origin}: {'; '.join(problems)}. If the files were damaged, {AGAIN}")
        self.storage = Storage(scheme.words, scheme.methods, len(self._modules), stored.num_bytes)

    def dtype(self, name: str) -> str:
        """Return the dtype in the terms of safetensors; a quantised weight is one of floating-point numbers."""
        return FLOATS[0] if self._is_hidden(name) else self._stored.dtype(name)

    def read(self, name: str) -> Tensor:
        """Read the tensor to the CPU.

        Raises:
            CheckpointError: a quantised weight cannot be computed, or is not finite, or its scales are all zero.
        """
        if not self._is_hidden(name):
            return self._stored.read(name)
        module = name.rpartition(".")[0]
        parts = {part: self._stored.read(f"{module}.{part}") for part in self._modules[module]}
        if dead := [part for part, tensor in parts.items() if "scale" in part and not bool(tensor.float().any())]:
            raise CheckpointError(f"{self._origin}: {module}.{dead[0]} is zero; {AGAIN}")
        try:
            weight = self._scheme.dequantise(module, parts)
        except Exception as error:  # of whatever class: dtypes that the library does not expect
            raise CheckpointError(f"{self._origin}: {name} cannot be dequantised ({error}); {AGAIN}") from error
        if not bool(weight.isfinite().all()):
            raise CheckpointError(f"{self._origin}: {name} is not finite when it is dequantised; {AGAIN}")
        return weight

    def _is_hidden(self, name: str) -> bool:
        """Return whether a tensor of the files is a part of a quantised weight, or rounds what goes into a layer."""
        module, _, part = name.rpartition(".")
        return part in OF_INPUTS or (part in PARTS and module in self._modules)


Block = tuple[int, int]
"""Rows and columns of a weight that share a scale; the last ones may be fewer."""


def grid(shape: Sequence[int], block: Block) -> list[int]:
    """Return the shape of the scales of a weight of ``shape``."""
    return [ceil(size / part) for size, part in zip(shape, block, strict=True)]


def times_scales(codes: Tensor, scales: Tensor, block: Block) -> Tensor:
    """Return ``codes [out, in]`` times the scale of their block, in float32; ``scales`` have the shape of the grid."""
    rows, columns = codes.shape
    of_rows = scales.repeat_interleave(block[0], 0)[:rows]
    return codes.float() * of_rows.repeat_interleave(block[1], 1)[:, :columns]


@dataclass
class Scaled:
    """Weights in float8 or float4, with scales of the weight, of its rows or of blocks.

    Scales in bytes are powers of two (E8M0). Codes of four bits share a byte, and have a scale of the scales in
    ``weight_scale_2``.

    Attributes:
        words, methods: see :class:`Storage`.
        blocks: sizes that the configuration allows.
    """

    words: str
    methods: frozenset[str]
    blocks: tuple[Block, ...] = ()

    def shape(self, module: str, parts: PartShapes) -> list[int]:
        """Return the shape of the weight that the parts of a module stand for, or raise UnfitError."""
        scale = parts.get("weight_scale_inv", parts.get("weight_scale"))
        if "weight" not in parts or scale is None:
            raise UnfitError(f"missing {module}.weight{'_scale or weight_scale_inv' if scale is None else ''}")
        *rows, columns = parts["weight"] or (0,)
        shape = [*rows, 2 * columns if "weight_scale_2" in parts else columns]
        if len(shape) != 2 or self._block(shape, scale) is None:
            sizes = " or ".join(f"{height} x {width}" for height, width in self.blocks) or "none"
            raise UnfitError(
                f"the scales {list(scale)} of {module}.weight {shape} are neither one nor one for each row, nor for "
                f"blocks (of this configuration: {sizes})"
            )
        return shape

    def dequantise(self, module: str, parts: Parts) -> Tensor:
        """Return the weight [out, in] of parts that fit, in float32."""
        codes, scales = parts["weight"], parts["weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"]
        scales = (scales.float() - 127).exp2() if scales.dtype == torch.uint8 else scales.float()
        if "weight_scale_2" in parts:
            from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

            codes = unpack_fp4_from_uint8(codes, codes.shape[0], 2 * codes.shape[1], torch.float32)
            scales = scales * parts["weight_scale_2"].float()
        block = self._block(codes.shape, scales.shape)
        assert block is not None, "shape() has found one"
        return times_scales(codes, scales.reshape(grid(codes.shape, block)), block)

    def _block(self, shape: Sequence[int], scale: Sequence[int]) -> Block | None:
        """Return the block that a scale belongs to, from the shape of the scales; None if no block fits."""
        rows, columns = shape
        sizes = list(scale[::2] if len(scale) == 4 else scale)  # Model Optimizer keeps dimensions of length 1
        if prod(sizes) == 1:
            return rows, columns
        if sizes in ([rows], [rows, 1]):
            return 1, columns
        return next((block for block in self.blocks if grid(shape, block) == sizes), None)


_EMBEDDINGS = ("embed_tokens", "markov_w1")
_FORMATS = frozenset(
    "int-quantized float-quantized naive-quantized pack-quantized mxfp8-quantized mxfp4-pack-quantized "
    "nvfp4-pack-quantized".split()
)
_UNTOLD = ("dense", "mixed-precision", "fakequant")
"""Formats that do not say how a module is stored: its group does, or else its numbers."""


class CompressedTensors:
    """Weights that ``quantization_config`` covers in groups, each with its form; for the attributes see Storage."""

    methods = frozenset({"compressed-tensors"})

    def __init__(self, config: Mapping[str, Any], origin: str) -> None:
        """Read the groups.

        Raises:
            CheckpointError: the library does not read the configuration, or weights are also transformed or sparse.
        """
        from compressed_tensors.compressors.format import infer_module_format
        from compressed_tensors.config import CompressionFormat
        from compressed_tensors.quantization import QuantizationConfig
        from compressed_tensors.utils.match import match_name

        sparsity = config.get("sparsity_config")
        is_sparse = isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense"
        if config.get("transform_config") or is_sparse:
            raise CheckpointError(
                f"{origin}: quantization_config has a transform_config or sparsity_config, which is not implemented; "
                "take an export with only quantised weights"
            )
        try:
            parsed = QuantizationConfig.model_validate(config)
            self._ignored = tuple(parsed.ignore or ())
            self._groups = tuple(group for group in parsed.config_groups.values() if group.weights is not None)
            for pattern in (*self._ignored, *(target for group in self._groups for target in group.targets)):
                match_name("", pattern)  # it may be no regular expression
        except Exception as error:  # of whatever class: it validates what it knows, and looks up names
            raise CheckpointError(
                f"{origin}: quantization_config is none of compressed-tensors ({' '.join(str(error).split())}); take "
                "the config.json that belongs to the checkpoint"
            ) from error
        for group in self._groups:
            told = None if parsed.format in _UNTOLD else parsed.format
            group.format = group.format or told or infer_module_format(nn.Linear, group)
            if group.format not in _FORMATS:
                raise CheckpointError(
                    f"{origin}: format={group.format!r} of quantization_config is not read; {INSTEAD}"
                )
            group.format = CompressionFormat(group.format)
        self.words = f"compressed-tensors {', '.join(sorted(set(map(_words, self._groups))))}"

    def shape(self, module: str, parts: PartShapes) -> list[int]:
        """Return the shape of the weight that the parts of a module stand for, or raise UnfitError."""
        group = self._group(module)
        if group is None:
            raise UnfitError(f"{module} is quantised, but quantization_config ignores it or names no group of it")
        needed = [part for part in _compressor(group).compression_param_names(group) if part.startswith("weight")]
        if missing := [f"missing {module}.{part}" for part in needed if part not in parts]:
            raise UnfitError("; ".join(missing))
        stored, args, scale = parts[needed[0]], group.weights, list(parts["weight_scale"])
        shape = list(parts.get("weight_shape", stored)) or [0]
        if needed[0] == "weight_packed" and "weight_shape" not in parts:
            shape[-1] *= 2  # two codes of four bits share a byte
        if len(shape) != 2 or ("weight_shape" in parts and stored != [shape[0], ceil(shape[1] * args.num_bits / 32)]):
            raise UnfitError(f"misshapen {module}.{needed[0]} {list(stored)}, for a weight {shape}")
        if args.group_size and shape[1] > args.group_size and shape[1] % args.group_size:
            raise UnfitError(f"group_size={args.group_size} does not divide the {shape[1]} columns of {module}.weight")
        block = args.block_structure or (1, args.group_size or shape[1])
        expected = [1] if args.strategy == "tensor" else grid(shape, (block[0], block[1]))
        if scale != expected and not (args.strategy == "tensor" and prod(scale) == 1):
            raise UnfitError(f"misshapen {module}.weight_scale {scale}, expected {expected}")
        return shape

    def dequantise(self, module: str, parts: Parts) -> Tensor:
        """Return the weight [out, in] of parts that fit, in the library's dtype: that of the scales, or bfloat16."""
        from compressed_tensors.quantization.lifecycle.forward import dequantize

        group = self._group(module)
        assert group is not None, "shape() has found it"
        if group.weights.strategy == "block":
            # The decompressor infers blocks from the shapes, which is wrong if the last one is smaller.
            zero_point = parts.get("weight_zero_point")
            return dequantize(parts["weight"], parts["weight_scale"], zero_point, args=group.weights)
        weight: Tensor = _compressor(group).decompress(dict(parts), group)["weight"]
        return weight

    def _group(self, module: str) -> QuantizationScheme | None:
        """Return the group of a module: one that names it, or else one of its class."""
        from compressed_tensors.utils.match import match_name

        if any(match_name(module, pattern) for pattern in self._ignored):
            return None
        kind = "Embedding" if module.endswith(_EMBEDDINGS) else "Linear"
        named = (group for group in self._groups if any(match_name(module, target) for target in group.targets))
        return next(named, next((group for group in self._groups if kind in group.targets), None))


def _compressor(group: QuantizationScheme) -> Any:
    from compressed_tensors.compressors import BaseCompressor

    return BaseCompressor.get_value_from_registry(group.format)


def _words(group: QuantizationScheme) -> str:
    args = group.weights.model_dump(mode="json")
    size = args["group_size"] or args["block_structure"]
    shared = f"{args['strategy']} of {size}" if size else args["strategy"]
    return f"{group.format.value} ({args['type']}{args['num_bits']} by {shared})"


Scheme = Scaled | CompressedTensors
"""A way to store weights."""

KEYS = ("quantization_config", "compression_config")
"""Keys of config.json that may hold it, in newer files and in older ones."""
_HUGGING_FACE = {"fp8": None, "fbgemm_fp8": None, "mxfp8": [1, 32]}
"""Methods of Hugging Face and SGLang, and their blocks if the configuration does not say."""
_MODELOPT: Mapping[str, str] = {
    **dict.fromkeys(("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"), "modelopt_fp8"),
    **dict.fromkeys(("NVFP4", "W4A16_NVFP4"), "modelopt_fp4"),
    "MXFP8": "mxfp8",
}
"""Algorithms of Model Optimizer -> SGLang's method."""
_MODELOPT_BLOCKS = ((128, 128), (1, 32), (1, 16))
"""Of FP8_PB_WO, MXFP8 and NVFP4. Which one a weight has, its scales show."""


def recognise_scheme(config: Mapping[str, Any], origin: str) -> Scheme:
    """Return the scheme of a checkpoint.

    Args:
        config: ``quantization_config`` of config.json, or the content of Model Optimizer's hf_quant_config.json.
        origin: the file, for messages.

    Raises:
        CheckpointError: it is not known, or unfit.
    """
    inner = _mapping(config.get("quantization")) or config
    algorithm = inner.get("quant_algo")
    method = str(config.get("quant_method", "modelopt" if algorithm else "compressed-tensors"))
    if method == "compressed-tensors":
        return CompressedTensors(config, origin)
    if method in _HUGGING_FACE:
        size = config.get("weight_block_size") or _HUGGING_FACE[method]
        if size is None:
            return Scaled(method, frozenset({method}))
        if not isinstance(size, list) or len(size) != 2 or any(type(n) is not int or n < 1 for n in size):
            raise CheckpointError(f"{origin}: weight_block_size={size!r} is no pair of positive integers; {INSTEAD}")
        return Scaled(f"{method} in blocks of {size[0]} x {size[1]}", frozenset({method}), ((size[0], size[1]),))
    layers = _mapping(inner.get("quantized_layers")) if algorithm == "MIXED_PRECISION" else {}
    algorithms = {str(_mapping(layer).get("quant_algo")) for layer in layers.values()} or {str(algorithm)}
    if method.startswith("modelopt") and algorithms <= _MODELOPT.keys():
        methods = {"modelopt", "modelopt_mixed", *(_MODELOPT[name] for name in algorithms)}
        return Scaled(f"Model Optimizer's {' and '.join(sorted(algorithms))}", frozenset(methods), _MODELOPT_BLOCKS)
    said = f"quant_method={method!r}" + (f" with quant_algo={', '.join(sorted(algorithms))}" if algorithm else "")
    raise CheckpointError(f"{origin}: {said} is not read; {INSTEAD}")


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
