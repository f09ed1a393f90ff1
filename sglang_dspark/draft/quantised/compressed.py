"""Compressed-tensors, as the library of this name computes it: float8, int8, int4 and other widths, NVFP4 and MXFP."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, prod
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from sglang_dspark.draft.quantised.modules import INSTEAD, Parts, PartShapes, UnfitError
from sglang_dspark.draft.quantised.scaled import grid
from sglang_dspark.errors import CheckpointError

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationScheme

_EMBEDDINGS = ("embed_tokens", "markov_w1")
_FORMATS = frozenset(
    "int-quantized float-quantized naive-quantized pack-quantized mxfp8-quantized mxfp4-pack-quantized "
    "nvfp4-pack-quantized".split()
)
_UNTOLD = ("dense", "mixed-precision", "fakequant")
"""Formats that do not say how a module is stored: its group does, or else its numbers."""


class CompressedTensors:
    """Weights that ``quantization_config`` covers by groups, each with its form; for the attributes see Storage."""

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
                "take an export with quantised weights alone"
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
        """Return the shape of the weight, or raise UnfitError."""
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
        """Return the weight in the library's dtype: that of the scales, or bfloat16."""
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
