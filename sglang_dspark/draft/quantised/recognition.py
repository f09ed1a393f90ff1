"""Recognition of the scheme by the configuration beside the tensors."""

from collections.abc import Mapping
from typing import Any

from sglang_dspark.draft.quantised.compressed import CompressedTensors
from sglang_dspark.draft.quantised.modules import INSTEAD, Scheme
from sglang_dspark.draft.quantised.scaled import Scaled
from sglang_dspark.errors import CheckpointError

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


def recognise(config: Mapping[str, Any], origin: str) -> Scheme:
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
