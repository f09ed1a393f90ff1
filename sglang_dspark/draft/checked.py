"""Dataclasses whose values come from files: types and bounds are declared once, with the fields, and checked."""

import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from msgspec import Meta, ValidationError, convert

from sglang_dspark.errors import CheckpointError

REMEDY = "take the config.json that belongs to the checkpoint"

Count = Annotated[int, Meta(ge=1)]
"""An integer of at least 1."""
Index = Annotated[int, Meta(ge=0)]
"""An integer of at least 0."""
Positive = Annotated[float, Meta(gt=0, le=sys.float_info.max)]
"""A finite number above 0."""


def check(cls: type, values: Mapping[str, Any], *, origin: str, names: Mapping[str, str] | None = None) -> None:
    """Check values for the fields of the dataclass ``cls``.

    Args:
        values: by field; a field that has a default may be left out.
        origin: the file that they are from; it opens the message.
        names: of the keys in that file, if they are not those of the fields.

    Raises:
        CheckpointError: one message that names every missing key, and every unfit key with its value.
    """
    kinds, problems = get_type_hints(cls, include_extras=True), []
    for field in fields(cls):
        name = (names or {}).get(field.name, field.name)
        if field.name not in values:
            if field.default is MISSING:
                problems.append(f"key {name!r} is missing")
            continue
        value, kind = values[field.name], kinds[field.name]
        try:
            convert(value, kind)
        except ValidationError as error:
            literal = next((part for part in (kind, *get_args(kind)) if get_origin(part) is Literal), None)
            expected = error if literal is None else f"Expected one of {', '.join(get_args(literal))}"
            problems.append(f"{name}={value!r}: {expected}")
    if problems:
        raise CheckpointError(f"{origin}: {'; '.join(dict.fromkeys(problems))}: {REMEDY}")
