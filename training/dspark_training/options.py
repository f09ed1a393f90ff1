"""Options of the command that are declared with the fields of a configuration: kind, bounds, default and help."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import click
from msgspec import Meta

from sglang_dspark.declared import field_types
from sglang_dspark.tools.cli.options import Numbers

_Command = TypeVar("_Command", bound=Callable[..., Any])


@dataclass(frozen=True)
class Flag:
    """The option of a field.

    Attributes:
        help: what the option does; a default other than None is added to it.
        name: without the dashes; empty: the field's name.
        decided: the command decides about the value if the user does not.
    """

    help: str
    name: str = ""
    decided: bool = False


class SectionedCommand(click.Command):
    """A command whose help lists the options of every configuration under a heading."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        found: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                found.setdefault(getattr(parameter, "section", "Options"), []).append(record)
        for title, records in found.items():
            with formatter.section(title):
                formatter.write_dl(records)


def settings_options(config: type, heading: str) -> Callable[[_Command], _Command]:
    """Add an option for every field of a dataclass that has a :class:`Flag` among its annotations."""

    class Option(click.Option):
        section = heading

    def add(command: _Command) -> _Command:
        kinds = field_types(config)
        for field in reversed(fields(config)):
            kind = kinds[field.name]
            notes = get_args(kind)[1:] if get_origin(kind) is Annotated else ()
            for flag in (note for note in notes if isinstance(note, Flag)):
                default = None if flag.decided or field.default is MISSING else field.default
                name = f"--{flag.name or field.name.replace('_', '-')}"
                if default is True:
                    name = f"{name}/--no-{name.removeprefix('--')}"
                how: dict[str, Any] = {"is_flag": True} if get_args(kind)[0] is bool else {"type": _click_type(kind)}
                shown = default is not None and default is not False
                command = click.option(
                    name, field.name, cls=Option, help=flag.help, default=default, show_default=shown, **how
                )(command)
        return command

    return add


def _click_type(kind: Any) -> Any:
    bare, *notes = get_args(kind)
    if get_origin(bare) is Literal:
        return click.Choice(get_args(bare))
    if get_origin(bare) is tuple:
        return Numbers(get_args(bare)[0])
    for note in notes:
        if isinstance(note, Meta):
            ranges: Any = click.IntRange if bare is int else click.FloatRange
            least, most = (note.gt if note.ge is None else note.ge), (note.lt if note.le is None else note.le)
            return ranges(least, most, min_open=note.ge is None, max_open=note.lt is not None)
    return bare


def taken(config: type, options: Mapping[str, Any], *, but: type | None = None) -> dict[str, Any]:
    """Return the options that are fields of ``config``, and not of ``but``."""
    left_out = {field.name for field in fields(but)} if but is not None else set()
    return {field.name: options[field.name] for field in fields(config) if field.name in options.keys() - left_out}
