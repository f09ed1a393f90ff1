"""A config.json as tables read it, rules for tensors, and the format that both show.

The rules turn the tensors of a file into the network's: names, orders of rows and columns. No value changes. A format
is recognised by content, because formats share the names of architectures.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from sglang_dspark.declared import REMEDY
from sglang_dspark.draft.config import ARCHITECTURES
from sglang_dspark.draft.families import FAMILIES
from sglang_dspark.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor


SECTIONS = ("dflash_config", "dspark_config", "eagle_config", "transformer_layer_config", "speculators_config")
"""Objects in config.json whose keys are read like those of the top level, with the section's name and a dot before."""

_SHORT = reprlib.Repr()
_SHORT.maxdict = _SHORT.maxlist = 5

Shapes = Mapping[str, Sequence[int]]
"""Shapes of tensors by their names."""
Table = Mapping[str, tuple[str, ...]]
"""Field of the canonical configuration -> keys that hold it. Several keys that are present must agree."""


@dataclass(frozen=True)
class Remark:
    """The reading of a key that was not taken at its word.

    Attributes:
        sentence: key, value and reason.
        doubtful: the drafter may have been trained as the key says, and then its drafts are poor.
    """

    sentence: str
    doubtful: bool = False


class Content:
    """The keys of one config.json, and the values that readers have found so far.

    Attributes:
        origin: the file, for messages.
        shapes: of the tensors in the checkpoint's files; empty without files.
        section: prefix of the keys of the layers, with its dot; empty for the top level.
        values: by field of :class:`DraftConfig`.
        names: field -> key that it was, or would have been, read from.
        remarks: on keys that were not taken at their word.
    """

    def __init__(self, content: Mapping[str, Any], origin: str, shapes: Shapes | None = None) -> None:
        self.origin, self.shapes, self.section = origin, shapes or {}, ""
        self.values: dict[str, Any] = {}
        self.names: dict[str, str] = {}
        self.remarks: list[Remark] = []
        self._keys: dict[str, Any] = {}
        self._read: set[str] = set()
        for key, value in content.items():
            if key in SECTIONS and isinstance(value, Mapping):
                self._keys |= {f"{key}.{name}": inner for name, inner in value.items()}
            else:
                self._keys[key] = value

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def find(self, *keys: str, default: Any = None) -> Any:
        """Return the value of the keys; ``default`` if none of them is present or all are null.

        Raises:
            CheckpointError: two of them contradict each other.
        """
        present = [key for key in keys if self._keys.get(key) is not None]
        self._read.update(keys)
        for key in present[1:]:
            if self._keys[key] != self._keys[present[0]]:
                raise CheckpointError(
                    f"{self.origin}: {present[0]}={self._keys[present[0]]!r} contradicts {key}={self._keys[key]!r}: "
                    f"{REMEDY}"
                )
        return self._keys[present[0]] if present else default

    def collect(self, table: Table, defaults: Mapping[str, Any] | None = None, *, optional: bool = False) -> None:
        """Set the values of the fields of ``table``.

        A field that is absent and has no default is left out, an ``optional`` one also if its key is null.
        """
        for name, keys in table.items():
            value = self.find(*keys, default=(defaults or {}).get(name))
            self.names[name] = next((key for key in keys if key in self), keys[0])
            if value is not None or (self.names[name] in self and not optional):
                self.values[name] = tuple(value) if isinstance(value, list) else value

    def require(self, key: str, served: Any) -> None:
        """Read a key that has only one value that is served, and may be absent.

        Raises:
            CheckpointError: it has another one.
        """
        if key in self and self.find(key) not in (None, served):
            raise CheckpointError(
                f"{self.origin}: {key}={self._keys[key]!r} is not supported; only {served!r} is, or no such key. Use "
                "another drafter of this target"
            )
        self._read.add(key)

    def skip(self, *keys: str) -> None:
        """Pass over keys that say nothing about the network."""
        self._read.update(keys)

    def remark(self, key: str, value: Any, words: str, *, doubtful: bool = False) -> None:
        """Note that ``key``, which has this value, was not taken at its word; the words continue the sentence."""
        self.remarks.append(Remark(f"{key}={_SHORT.repr(value)} {words}", doubtful))

    def ignore(self, key: str, reason: str) -> None:
        """Pass over a key that had no part in the training, and note it if it says anything."""
        if value := self.find(key):
            self.remark(key, value, f"is ignored: {reason}")

    def unread(self) -> tuple[str, ...]:
        """Return the keys that were not read, except those that are null."""
        return tuple(sorted(key for key in self._keys.keys() - self._read if self._keys[key] is not None))

    def refuse(self, key: str, reason: str) -> CheckpointError:
        """Return an error about one key."""
        shown = f"{key}={self._keys[key]!r}" if key in self else f"key {key!r} is missing"
        return CheckpointError(f"{self.origin}: {shown} {reason}")


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
# What trainers store of the target next to the drafter.
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
    """Return an order of the channels in which i rotates with i + head_dim / 2, only the first pairs.

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


FormatName = Literal["DeepSpec", "SpecForge", "ModelOpt", "speculators", "TorchSpec", "DFlash", "llama.cpp"]

SERVED = (
    "formats that load are DeepSpec (also NeMo and Ling), SpecForge, ModelOpt, speculators (dspark, dflash, dflash2), "
    "DFlash and DFlash 2, TorchSpec and llama.cpp's GGUF, of drafters with Qwen3 layers, and DeepSpec with Gemma 4's"
)

_TARGETS = {family.architecture for family in FAMILIES}
_DEEPSPEC = {*ARCHITECTURES.values(), "LingDSparkModel", "Qwen3OmniDSparkModel"}
_DFLASH = {
    *("DFlashDraftModel", "DFlash2DraftModel", "DFlashSpeculator"),
    *("Qwen3DFlashDraftModel", "Qwen3DFlash2DraftModel"),  # NeMo AutoModel's
}

_SERVED_CLASSES = {*_DEEPSPEC, *_DFLASH, "DSparkDraftModel", "DSparkSpeculator", "Lfm2DSparkDraftModel"}
"""Architectures with Qwen3's layers, or Gemma 4's. The layers of any other may differ in what no tensor shows."""
_OF_DRAFTERS = re.compile("DSpark|DFlash|Draft|Speculator|Eagle|Assistant", re.IGNORECASE)

_UNKNOWN_CLASS = (
    "its layers may be its own, and then drafts are poor. If they are those of a class that loads, name that class in "
    "architectures, such as DFlashDraftModel, and leave auto_map out"
)


def recognise_format(config: Mapping[str, Any], tensors: Collection[str], origin: str) -> FormatName:
    """Return the format of a checkpoint.

    Args:
        config: decoded config.json.
        tensors: names in its files; empty if there are none.
        origin: the file, for messages.

    Raises:
        CheckpointError: it has none of the formats, or a network of another kind.
    """
    nested = config.get("dflash_config")
    dflash: Mapping[str, Any] = nested if isinstance(nested, Mapping) else {}
    _refuse_other_classes(config, origin)
    if config.get("speculators_model_type") is not None:
        return "speculators"
    names = _architectures(config)
    if config.get("format") == "llama.cpp":
        return "llama.cpp"
    if names & _DEEPSPEC:
        return "DeepSpec"
    is_modelopt = "markov_w1.weight" in tensors or bool(dflash.keys() & {"use_confidence_head", "shift_label"})
    if dflash.get("projector_type") == "dspark" and is_modelopt:
        return "ModelOpt"
    if dflash.get("projector_type") == "dspark" or "Lfm2DSparkDraftModel" in names:
        return "SpecForge"
    if "DSparkDraftModel" in names and dflash:
        return "SpecForge"
    has_heads = any("markov_head." in name for name in tensors)
    if has_heads or config.keys() & {"pard_token", "dspark_markov_rank"}:
        return "TorchSpec"
    if names & _DFLASH and (dflash or {"block_size", "mask_token_id"} <= config.keys()):
        return "DFlash"
    if not names:
        raise CheckpointError(f"{origin}: key 'architectures' is missing; {SERVED}")
    raise CheckpointError(f"{origin}: architectures={config['architectures']!r} has keys of no format; {SERVED}")


def _architectures(config: Mapping[str, Any]) -> set[str]:
    names = config.get("architectures")
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()


def _remote_classes(config: Mapping[str, Any]) -> set[str]:
    """Return the classes of drafters among those that ``auto_map`` names; a target's may be left over."""
    listed = config.get("auto_map")
    items = listed.items() if isinstance(listed, Mapping) else ()
    names = {str(name).rpartition(".")[2] for key, name in items if str(key).startswith("AutoModel")}
    return {name for name in names if _OF_DRAFTERS.search(name)}


def _refuse_other_classes(config: Mapping[str, Any], origin: str) -> None:
    """Raise for networks that may only resemble the one that is served. What their tensors show is refused later."""
    kind = config.get("speculators_model_type")
    if kind not in (None, "dspark", "dflash", "dflash2"):
        raise CheckpointError(f"{origin}: speculators_model_type={kind!r} is not supported; {SERVED}")
    for key, names in (("architectures", _architectures(config)), ("auto_map", _remote_classes(config))):
        for name in sorted(names - _SERVED_CLASSES):
            reason = "it is a target, not a drafter" if name in _TARGETS else _UNKNOWN_CLASS
            raise CheckpointError(f"{origin}: {key}: {name} is not supported: {reason}; {SERVED}")
