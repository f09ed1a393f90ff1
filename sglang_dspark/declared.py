"""Values from outside whose type and bounds are declared once, in an annotation, and checked by msgspec.

``Annotated[int, int_range(0, 7)]`` carries the rule for the check, and its words for the message.
"""

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
Scalar = str | int | float | bool | None
"""A value of a flat JSON object."""


def int_range(minimum: int, maximum: int | None = None) -> Meta:
    """Declare an integer in these bounds, which are included."""
    words = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
    return Meta(ge=minimum, le=maximum, description=f"must be an integer {words}")


def field_types(cls: type) -> dict[str, Any]:
    """Return the annotations of a class by field, without the None of optional ones: it says that no value is given."""
    hints = get_type_hints(cls, include_extras=True)
    return {name: get_args(hint)[0] if type(None) in get_args(hint) else hint for name, hint in hints.items()}


def validate(value: Any, annotation: Any) -> Any:
    """Return ``value`` in the type of the annotation: lists become tuples, and integers floats.

    Raises:
        ValueError: the rule that it breaks, in words.
    """
    try:
        return convert(value, annotation)
    except ValidationError as error:
        raise ValueError(describe(annotation)) from error


def truncate(value: Any) -> str:
    """Return ``value`` for a message, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def describe(annotation: Any) -> str:
    """Return the rule of an annotation in words: ``must be an integer from 0 to 7``."""
    bare, *notes = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
    for note in notes:
        if isinstance(note, Meta) and note.description:
            return note.description
    if get_origin(bare) is Literal:
        return f"must be one of {', '.join(get_args(bare))}"
    return "must be true or false" if bare is bool else "must be a text"


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
