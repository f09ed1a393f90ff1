"""Commands with so many options that their help needs headings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click


class SectionedCommand(click.Command):
    """A command whose help lists its options in sections.

    Args:
        sections: name of the first option of a section, in the order of declaration -> its heading.
    """

    def __init__(self, *args: Any, sections: Mapping[str, str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sections = sections

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        found: dict[str, list[tuple[str, str]]] = {}
        heading = "Options"
        for parameter in self.get_params(ctx):
            heading = self._sections.get(parameter.name or "", heading)
            record = parameter.get_help_record(ctx)
            if record is not None:
                found.setdefault(heading, []).append(record)
        for title, records in found.items():
            with formatter.section(title):
                formatter.write_dl(records)
