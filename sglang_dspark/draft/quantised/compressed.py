"""Compressed-tensors, as the library of this name computes it: float8, int8, int4 and other widths, NVFP4 and MXFP."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, prod
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from sglang_dspark.draft.quantised.modules import Parts, PartShapes
from sglang_dspark.draft.quantised.scaled import grid
from sglang_dspark.errors import CheckpointError

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

_EMBEDDINGS = ("embed_tokens", "markov_w1")
_UNTOLD = ("dense", "mixed-precision", "fakequant")
"""Formats that do not say how a module is stored: its group does, or else its numbers."""


class CompressedTensors:
    """Weights that ``quantization_config`` covers by groups, each with its form.

    Attributes:
        words, methods: see :class:`Storage`.
    """

    methods = frozenset({"compressed-tensors"})

    def __init__(self, config: Mapping[str, Any], origin: str) -> None:
        """Read the groups.

        Raises:
            CheckpointError: the library does not read the configuration, or weights are transformed or sparse besides.
        """
        from compressed_tensors.compressors.format import infer_module_format
        from compressed_tensors.config import CompressionFormat
        from compressed_tensors.quantization import QuantizationConfig

        sparsity = config.get("sparsity_config")
        if config.get("transform_config") or (sparsity and sparsity.get("format", "dense") != "dense"):
            raise CheckpointError(
                f"{origin}: quantization_config has a transform_config or sparsity_config, which is not implemented; "
                "take an export with quantised weights alone"
            )
        try:
            parsed = QuantizationConfig.model_validate(config)
        except (ValueError, TypeError, NotImplementedError) as error:
            raise CheckpointError(
                f"{origin}: quantization_config is none of compressed-tensors ({' '.join(str(error).split())}); take "
                "the config.json that belongs to the checkpoint"
            ) from error
        self._ignored = tuple(parsed.ignore or ())
        self._schemes = tuple(scheme for scheme in parsed.config_groups.values() if scheme.weights is not None)
        for scheme in self._schemes:
            told = None if parsed.format in _UNTOLD else parsed.format
            scheme.format = CompressionFormat(scheme.format or told or infer_module_format(nn.Linear, scheme))
        self.words = f"compressed-tensors {', '.join(sorted(set(map(_words, self._schemes))))}"

    def check(self, module: str, parts: PartShapes) -> list[str]:
        """Return what is wrong with the parts of a module."""
        scheme = self._scheme(module)
        if scheme is None:
            return [f"{module} is quantised, but quantization_config ignores it or names no group of it"]
        needed = _compressor(scheme).compression_param_names(scheme)
        missing = [part for part in needed if part.startswith("weight") and part not in parts]
        if missing:
            return [f"missing {module}.{part}" for part in missing]
        weights, shape, scale = scheme.weights, self.shape(parts), list(parts["weight_scale"])
        packed = [shape[0], ceil(shape[-1] * weights.num_bits / 32)]
        if len(shape) != 2 or ("weight_shape" in parts and list(parts["weight_packed"]) != packed):
            return [f"misshapen {module}.{part} {list(size)}" for part, size in sorted(parts.items())]
        if weights.group_size and shape[1] > weights.group_size and shape[1] % weights.group_size:
            return [f"group_size={weights.group_size} does not divide the {shape[1]} columns of {module}.weight"]
        if weights.strategy == "tensor":
            expected = scale if prod(scale) == 1 else [1]
        else:
            expected = grid(shape, _block(weights, shape[1]))
        return [] if scale == expected else [f"misshapen {module}.weight_scale {scale}, expected {expected}"]

    def shape(self, parts: PartShapes) -> list[int]:
        """Return the shape of the weight; without ``weight_shape``, two codes of four bits share a byte."""
        if "weight_packed" not in parts:
            return list(parts["weight"])
        *rows, columns = parts["weight_packed"]
        return list(parts.get("weight_shape", (*rows, 2 * columns)))

    def dequantise(self, module: str, parts: Parts) -> Tensor:
        """Return the weight in the library's dtype: that of the scales, or bfloat16."""
        from compressed_tensors.quantization.lifecycle.forward import dequantize

        scheme = self._scheme(module)
        assert scheme is not None, "check has found it"
        if scheme.weights.strategy == "block":
            # The decompressor infers blocks from the shapes, which is wrong if the last one is smaller.
            zero_point = parts.get("weight_zero_point")
            return dequantize(parts["weight"], parts["weight_scale"], zero_point, args=scheme.weights)
        weight: Tensor = _compressor(scheme).decompress(dict(parts), scheme)["weight"]
        return weight

    def _scheme(self, module: str) -> QuantizationScheme | None:
        """Return the group of a module: one that names it, or else one of its class."""
        from compressed_tensors.utils.match import match_name

        if any(match_name(module, pattern) for pattern in self._ignored):
            return None
        kind = "Embedding" if module.endswith(_EMBEDDINGS) else "Linear"
        named = (scheme for scheme in self._schemes if any(match_name(module, target) for target in scheme.targets))
        return next(named, next((scheme for scheme in self._schemes if kind in scheme.targets), None))


def _compressor(scheme: QuantizationScheme) -> Any:
    from compressed_tensors.compressors import BaseCompressor

    return BaseCompressor.get_value_from_registry(scheme.format)


def _block(weights: QuantizationArgs, columns: int) -> tuple[int, int]:
    if weights.block_structure is not None:
        rows, columns = weights.block_structure
        return rows, columns
    return 1, weights.group_size or columns


def _words(scheme: QuantizationScheme) -> str:
    weights = scheme.weights.model_dump(mode="json")
    width = weights["group_size"] or weights["block_structure"]
    number, strategy = f"{weights['type']}{weights['num_bits']}", weights["strategy"]
    return f"{scheme.format.value} ({number} by {strategy}{f' of {width}' if width else ''})"
