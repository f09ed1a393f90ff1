"""Modules whose weight is stored as codes beside scales, which look like modules with an ordinary weight."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from sglang_dspark.draft.quantised.storage import Storage
from sglang_dspark.draft.stored import FLOATS, StoredTensors
from sglang_dspark.errors import CheckpointError

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


class Scheme(Protocol):
    """A way to store weights; for the attributes see :class:`Storage`."""

    words: str
    methods: frozenset[str]

    def shape(self, module: str, parts: PartShapes) -> list[int]:
        """Return the shape of the weight that the parts of a module stand for, or raise UnfitError."""
        ...

    def dequantise(self, module: str, parts: Parts) -> Tensor:
        """Return the weight [out, in] of parts that fit."""
        ...


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
