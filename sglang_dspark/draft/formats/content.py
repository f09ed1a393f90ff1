"""A decoded config.json that is read by tables, and that knows which of its keys were not read."""

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_dspark.declared import REMEDY
from sglang_dspark.errors import CheckpointError

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
        for field, keys in table.items():
            value = self.find(*keys, default=(defaults or {}).get(field))
            self.names[field] = next((key for key in keys if key in self), keys[0])
            if value is not None or (self.names[field] in self and not optional):
                self.values[field] = tuple(value) if isinstance(value, list) else value

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
        """Return the keys that were not read, but for those that are null."""
        return tuple(sorted(key for key in self._keys.keys() - self._read if self._keys[key] is not None))

    def refuse(self, key: str, reason: str) -> CheckpointError:
        """Return an error about one key."""
        shown = f"{key}={self._keys[key]!r}" if key in self else f"key {key!r} is missing"
        return CheckpointError(f"{self.origin}: {shown} {reason}")
