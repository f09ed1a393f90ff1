"""The ``speculation`` field of a request body."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Speculation:
    """Per-request options of DSPARK.

    Attributes:
        trace: return the decode rounds in ``meta_info["dspark_trace"]``, one entry per output token: the round at the
            first token that it committed, null elsewhere.
    """

    trace: bool = False

    @classmethod
    def parse(cls, value: Any) -> Speculation:
        """Check a decoded JSON value.

        Raises:
            ValueError: not an object, an unknown key, or a value of the wrong type; names ``speculation`` and the key.
        """
        if value is None:
            return cls()
        if not isinstance(value, dict):
            raise ValueError(f"speculation must be an object, not {value!r}")
        known = {f.name for f in fields(cls)}
        for key, entry in value.items():
            if key not in known:
                raise ValueError(f"speculation.{key} is not a known option; known are {', '.join(sorted(known))}")
            if not isinstance(entry, bool):
                raise ValueError(f"speculation.{key} must be true or false, not {entry!r}")
        return cls(**value)

    def to_dict(self) -> dict[str, Any]:
        """Options that differ from their defaults."""
        return {k: v for k, v in asdict(self).items() if v != getattr(Speculation, k)}
