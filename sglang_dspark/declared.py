"""Values whose kind and bounds are declared once, in an annotation, and checked by msgspec.

``Annotated[int, whole(0, 7)]`` carries the rule for the check, and its words for the message.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from msgspec import Meta, ValidationError, convert

from sglang_dspark.errors import ConfigError


def whole(least: int, most: int | None = None) -> Meta:
    """An integer in these bounds, which are included."""
    words = f"of at least {least}" if most is None else f"from {least} to {most}"
    return Meta(ge=least, le=most, description=f"must be an integer {words}")


def kinds(cls: type) -> dict[str, Any]:
    """Annotations of a class by field, without the None of optional ones: it stands for a value that is not given."""
    hints = get_type_hints(cls, include_extras=True)
    return {name: get_args(kind)[0] if type(None) in get_args(kind) else kind for name, kind in hints.items()}


def checked(value: Any, kind: Any) -> Any:
    """``value`` as the annotation ``kind`` wants it: lists become tuples, and integers floats.

    Raises:
        ValueError: the rule that it breaks, in words.
    """
    try:
        return convert(value, kind)
    except ValidationError as error:
        raise ValueError(rule(kind)) from error


def check_fields(config: Any) -> None:
    """Check the declared fields of a dataclass that are not None.

    Raises:
        ConfigError: names the first field that breaks its rule, its value and the rule.
    """
    for name, kind in kinds(type(config)).items():
        value = getattr(config, name)
        if value is not None and get_origin(kind) in (Annotated, Literal):
            try:
                checked(value, kind)
            except ValueError as error:
                raise ConfigError(f"{name}={value!r} {error}") from error


def shown(value: Any) -> str:
    """``value`` for a message, cut to a line."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def rule(kind: Any) -> str:
    """Return what an annotation asks for, in words: ``must be an integer from 0 to 7``."""
    bare, *notes = get_args(kind) if get_origin(kind) is Annotated else (kind,)
    for note in notes:
        if isinstance(note, Meta) and note.description:
            return note.description
    if get_origin(bare) is Literal:
        return f"must be one of {', '.join(get_args(bare))}"
    return "must be true or false" if bare is bool else "must be a text"
