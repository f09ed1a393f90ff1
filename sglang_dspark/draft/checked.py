"""Dataclasses whose values come from files: types and bounds are declared once, with the fields, and checked."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Annotated, Any, get_type_hints

import pydantic

from sglang_dspark.errors import CheckpointError

REMEDY = "take the config.json that belongs to the checkpoint"

Count = Annotated[int, pydantic.Field(ge=1)]
"""An integer of at least 1."""
Index = Annotated[int, pydantic.Field(ge=0)]
"""An integer of at least 0."""
Positive = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]
"""A finite number above 0."""


def check(
    cls: type,
    values: Mapping[str, Any],
    *,
    origin: str,
    names: Mapping[str, str] | None = None,
    remedy: str = REMEDY,
) -> None:
    """Check values for the fields of the dataclass ``cls``.

    Args:
        values: by field; a field that has a default may be left out.
        origin: the file that they are from; it opens the message.
        names: of the keys in that file, if they are not those of the fields.
        remedy: closes the message.

    Raises:
        CheckpointError: one message that names every missing key, and every unfit key with its value.
    """
    try:
        _schema(cls).model_validate(dict(values))
    except pydantic.ValidationError as error:
        problems = []
        for problem in error.errors(include_url=False):
            field = str(problem["loc"][0])
            name = (names or {}).get(field, field)
            if problem["type"] == "missing":
                problems.append(f"key {name!r} is missing")
            else:
                expected = problem["msg"].removeprefix("Input should be ")
                problems.append(f"{name}={values[field]!r} should be {expected}")
        raise CheckpointError(f"{origin}: {'; '.join(dict.fromkeys(problems))}: {remedy}") from error


@functools.cache
def _schema(cls: type) -> type[pydantic.BaseModel]:
    """Return the dataclass as pydantic sees it: no conversion of types, no other fields."""
    hints = get_type_hints(cls, include_extras=True)
    columns: dict[str, Any] = {}
    for field in fields(cls):
        required = field.default is MISSING and field.default_factory is MISSING
        columns[field.name] = (hints[field.name], ... if required else pydantic.Field(default=None))
    settings = pydantic.ConfigDict(strict=True, extra="forbid")
    return pydantic.create_model(cls.__name__, __config__=settings, **columns)
