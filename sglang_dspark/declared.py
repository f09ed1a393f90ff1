"""Values whose type and bounds are declared once, in an annotation, and checked by msgspec.

``Annotated[int, int_range(0, 7)]`` carries the rule for the check, and its words for the message.
"""

from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from msgspec import Meta, ValidationError, convert

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
