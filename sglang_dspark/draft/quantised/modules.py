"""Modules whose weight is stored as codes beside scales, which look like modules with an ordinary weight."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from sglang_dspark.draft.stored import FLOATS, StoredTensors
from sglang_dspark.draft.quantised.storage import Storage
from sglang_dspark.errors import CheckpointError

PARTS = frozenset(
    "weight weight_packed weight_shape weight_scale weight_scale_inv weight_scale_2 weight_global_scale "
    "weight_zero_point weight_g_idx".split()
)
"""Last parts of the names of tensors that stand for one weight together."""
OF_ACTIVATIONS = frozenset("input_scale input_global_scale input_zero_point activation_scale".split())
"""The same of tensors that round what goes into a layer. Inputs are not rounded here, so these are not read."""
_CACHE = "is for a quantised K/V cache, and the drafter's has the dtype of its weights; take an export without"
REFUSED = {
    "pre_quant_scale": "scales the inputs of its layer, which is not implemented; take an export without",
    **dict.fromkeys(("k_scale", "v_scale", "q_scale"), _CACHE),
}
"""The same of tensors without which the drafter would be another, and what to do."""
AGAIN = "download the checkpoint again, or take another export of the drafter"

Parts = Mapping[str, Tensor]
"""Tensors of one module by the last part of their names."""
PartShapes = Mapping[str, Sequence[int]]
"""Their shapes. That of ``weight_shape`` is its content."""


class Scheme(Protocol):
    """A way to store weights.

    Attributes:
        words, methods: see :class:`Storage`.
    """

    words: str
    methods: frozenset[str]

    def check(self, module: str, parts: PartShapes) -> list[str]:
        """Return what is wrong with the parts of a module, each problem with the name of a tensor; nothing if fit."""
        ...

    def shape(self, parts: PartShapes) -> list[int]:
        """Return the shape of the weight that fit parts stand for."""
        ...

    def dequantise(self, module: str, parts: Parts) -> Tensor:
        """Return the weight [out, in]."""
        ...


class DequantisedTensors:
    """The tensors of a quantised checkpoint: a weight is computed when it is read.

    Attributes:
        storage: what is said of them.
    """

    def __init__(self, stored: StoredTensors, scheme: Scheme, origin: str) -> None:
        """Check the parts of every quantised weight.

        Raises:
            CheckpointError: parts are missing or do not fit each other, or the drafter needs more than its weights;
                one message names all such tensors.
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
            for module, parts in sorted(found.items())
            if parts != {"weight"} or stored.dtype(f"{module}.weight") not in FLOATS
        }
        parts_of: dict[str, PartShapes] = {
            module: {part: self._part_shape(f"{module}.{part}", shapes) for part in parts}
            for module, parts in self._modules.items()
        }
        problems += [problem for module, parts in parts_of.items() for problem in scheme.check(module, parts)]
        if problems:
            raise CheckpointError(f"{origin}: {'; '.join(problems)}. If the files were damaged, {AGAIN}")
        self.shapes = {name: shape for name, shape in shapes.items() if not self._is_hidden(name)}
        """Shapes of the tensors by their names, as if none were quantised."""
        self.shapes |= {f"{module}.weight": scheme.shape(parts) for module, parts in parts_of.items()}
        self.storage = Storage(scheme.words, scheme.methods, len(self._modules), stored.num_bytes)

    def dtype(self, name: str) -> str:
        """Return the dtype in the terms of safetensors; that of a quantised weight is one of floating-point numbers."""
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
        except (ValueError, RuntimeError, IndexError, AssertionError) as error:
            raise CheckpointError(f"{self._origin}: {name} cannot be dequantised ({error}); {AGAIN}") from error
        if not bool(weight.isfinite().all()):
            raise CheckpointError(f"{self._origin}: {name} is not finite when it is dequantised; {AGAIN}")
        return weight

    def _is_hidden(self, name: str) -> bool:
        """Return whether a tensor of the files is a part of a quantised weight, or rounds what goes into a layer."""
        module, _, part = name.rpartition(".")
        return part in OF_ACTIVATIONS or (part in PARTS and module in self._modules)

    def _part_shape(self, name: str, shapes: Mapping[str, Sequence[int]]) -> Sequence[int]:
        return self._stored.read(name).tolist() if name.endswith(".weight_shape") else shapes[name]
