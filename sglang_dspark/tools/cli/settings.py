"""Options that fill a field of a configuration: kind, bounds and default are the field's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import click
from msgspec import Meta

from sglang_dspark.declared import field_types

_Command = TypeVar("_Command", bound=Callable[..., Any])


def setting(flag: str, config: type, name: str, text: str, **how: Any) -> Callable[[_Command], _Command]:
    """Like ``click.option``, for the field ``name`` of the dataclass ``config``.

    Args:
        text: the help; a default other than None is added to it.
        how: overrides of what the field says.
    """
    [field] = [field for field in fields(config) if field.name == name]
    default = None if field.default is MISSING else field.default
    declared = {"type": _click_type(field_types(config)[name]), "default": default, "show_default": default is not None}
    return click.option(flag, name, help=text, **declared | how)


def _click_type(kind: Any) -> Any:
    bare, *notes = get_args(kind) if get_origin(kind) is Annotated else (kind,)
    if get_origin(bare) is Literal:
        return click.Choice(get_args(bare))
    for note in notes:
        if isinstance(note, Meta):
            ranges: Any = click.IntRange if bare is int else click.FloatRange
            least, most = (note.gt if note.ge is None else note.ge), (note.lt if note.le is None else note.le)
            return ranges(least, most, min_open=note.ge is None, max_open=note.lt is not None)
    return bare


def taken(config: type, options: Mapping[str, Any], *, but: type | None = None) -> dict[str, Any]:
    """The options that are fields of ``config``, and not of ``but``."""
    left_out = {field.name for field in fields(but)} if but is not None else set()
    return {field.name: options[field.name] for field in fields(config) if field.name in options.keys() - left_out}
