"""Rules that turn the tensors of a file into the network's: names, orders of rows and columns. No value changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sglang_dspark.draft.formats.content import Shapes
from sglang_dspark.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

DRAFT_TO_TARGET, IS_DRAFTED = "d2t", "t2d"
"""Tensors of a reduced vocabulary: [v] target id minus draft id, and [V] bool which target ids are proposed."""

FLAT_HEADS = {
    "markov_w1.weight": "markov_head.markov_w1.weight",
    "markov_w2.weight": "markov_head.markov_w2.weight",
    "gate_proj.weight": "markov_head.gate_proj.weight",
    "gate_proj.bias": "markov_head.gate_proj.bias",
    "joint_proj.weight": "markov_head.joint_proj.weight",
    "joint_proj.bias": "markov_head.joint_proj.bias",
    "confidence_proj.weight": "confidence_head.proj.weight",
    "confidence_proj.bias": "confidence_head.proj.bias",
}
"""Names of the heads' tensors in files that have no modules for them -> those with modules."""

SELECTOR = {
    "candidate_selector.predecessor_codebook": "markov_head.markov_w1.weight",
    "candidate_selector.successor_codebook": "markov_head.markov_w2.weight",
    "candidate_selector.hidden_projection.weight": "markov_head.hidden_projection.weight",
}
"""Names of the tensors of DFlash 2's selector."""

_PREFIXES = {"model.": "", "logit_head.": "", "midlayer.": "layers.0."}
# What trainers store of the target beside the drafter.
_DROPPED = ("verifier_lm_head.", "verifier_norm.", DRAFT_TO_TARGET, IS_DRAFTED)


@dataclass(frozen=True)
class TensorRules:
    """Names and orders that turn the tensors of one file into those of the network.

    Attributes:
        renamed: name in the file -> name here, of tensors that common prefixes do not explain.
        tap_order: for each tap of the configuration its index among the blocks of columns of ``fc``; empty for the same
            order.
        rotary_order: for each channel of a head its index in the rows of queries and keys; empty for the same order.
        head_dim: channels of a head.
    """

    renamed: Mapping[str, str] = field(default_factory=dict)
    tap_order: tuple[int, ...] = ()
    rotary_order: tuple[int, ...] = ()
    head_dim: int = 0

    def name(self, name: str) -> str | None:
        """Return the network's name of a tensor of the file; None if the network does not need it."""
        if name in self.renamed:
            return self.renamed[name]
        for prefix, replacement in _PREFIXES.items():
            if name.startswith(prefix):
                name = replacement + name.removeprefix(prefix)
        name = SELECTOR.get(name, name)
        return None if name.startswith(_DROPPED) else name

    def shapes(self, stored: Shapes) -> Shapes:
        """Return the shapes of the network's tensors, by its names."""
        return {here: shape for name, shape in stored.items() if (here := self.name(name)) is not None}

    def names(self, stored: Iterable[str], origin: str) -> dict[str, str]:
        """Return the name in the file by the network's name.

        Raises:
            CheckpointError: two tensors of the file have the same name here.
        """
        found: dict[str, str] = {}
        for name in stored:
            here = self.name(name)
            if here is None:
                continue
            if here in found:
                raise CheckpointError(
                    f"{origin}: {found[here]} and {name} are the same tensor; take an intact checkpoint"
                )
            found[here] = name
        return found

    def order(self, name: str, tensor: Tensor) -> Tensor:
        """Return the tensor ``name`` (of the network) of the file, its rows and columns in the network's order."""
        if name == "fc.weight" and self.tap_order:
            return tensor.unflatten(1, (len(self.tap_order), -1))[:, list(self.tap_order)].flatten(1)
        if not self.rotary_order or ".self_attn." not in name:
            return tensor
        module = name.split(".")[-2]
        if module in ("q_norm", "k_norm"):
            return tensor[list(self.rotary_order)]
        if module in ("q_proj", "k_proj"):
            return tensor.unflatten(0, (-1, self.head_dim))[:, list(self.rotary_order)].flatten(0, 1)
        return tensor


def rotary_order(head_dim: int, rotated: int, *, neighbours: bool, span_head: bool) -> tuple[int, ...]:
    """Return an order of the channels in which i rotates with i + head_dim / 2, the first pairs alone.

    Args:
        head_dim: channels of a head.
        rotated: channels that rotate.
        neighbours: the file pairs channels 2i and 2i + 1, otherwise i and i + rotated / 2.
        span_head: the file pairs channels as it is done here.

    Returns:
        Empty if nothing changes.
    """
    if span_head or (rotated == head_dim and not neighbours):
        return ()
    half = rotated // 2
    first = [2 * i if neighbours else i for i in range(half)]
    second = [2 * i + 1 if neighbours else i + half for i in range(half)]
    rest = list(range(rotated, head_dim))
    return (*first, *rest[: len(rest) // 2], *second, *rest[len(rest) // 2 :])
