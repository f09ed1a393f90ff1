"""The ``speculation`` field of a request body: how it is read, and the keys that every server knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct

from sglang_dspark.declared import int_range, truncate, validate

KEY = "dspark"
"""Of ``custom_params``, which SGLang carries to the scheduler: JSON text with what a request asks for, by feature."""
CORE = "core"
"""The name under which :class:`Speculation` travels next to the features'."""
MOST_DRAFTS = 65535
"""Largest number of drafts that a request may name."""

Probability = Annotated[float, Meta(ge=0, le=1, description="must be a number from 0 to 1")]


class Speculation(Struct, frozen=True, omit_defaults=True):
    """Keys of the field that no feature has declared. The scheduler reads them as they are; defaults ask for nothing.

    Attributes:
        enabled: whether drafts are verified for the request at all.
        max_verify: most drafts verified for it per step; None leaves it to the server.
        confidence_threshold: verify the drafts before the first one whose raw confidence is below this; None verifies
            whatever the policy says.
        trace: return the decode rounds in ``meta_info["dspark_trace"]``, one entry per output token: the round at the
            first token that it committed, null elsewhere.
    """

    enabled: bool = True
    max_verify: Annotated[int, int_range(0, MOST_DRAFTS)] | None = None
    confidence_threshold: Probability | None = None
    trace: bool = False

    def verify_limit(self, max_verify: int) -> int:
        """Return the most drafts verified per step on a server that verifies up to ``max_verify``."""
        if not self.enabled:
            return 0
        return max_verify if self.max_verify is None else min(self.max_verify, max_verify)


def checked(value: Any, types: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that a decoded JSON value gives, each in its type.

    Args:
        types: of all keys, see :func:`~sglang_dspark.declared.field_types`.

    Raises:
        ValueError: not an object, an unknown key, or a bad value; names ``speculation``, the key and the remedy.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"speculation must be an object, not {truncate(value)}")
    given = {}
    for key, entry in value.items():
        if key not in types:
            known = ", ".join(sorted(types))
            raise ValueError(f"speculation.{truncate(key)[1:-1]} is not a known option; known are {known}")
        try:
            given[key] = validate(entry, types[key])
        except ValueError as error:
            raise ValueError(f"speculation.{key} {error}, not {truncate(entry)}") from None
    return given
