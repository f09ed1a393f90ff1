"""``python -m sglang_dspark convert``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from sglang_dspark.tools.cli.checkpoint import Checkpoint


class Setting(click.ParamType):  # type: ignore[type-arg]  # generic in some releases of click, not in others
    """``key=value`` with a value in JSON."""

    name = "key=value"

    def convert(
        self, value: str | tuple[str, Any], param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, Any]:
        if isinstance(value, tuple):
            return value
        key, _, text = value.partition("=")
        try:
            return key, json.loads(text)
        except ValueError:
            self.fail(f"{value!r} is not KEY=VALUE with a value in JSON, such as sample_from_anchor=true", param, ctx)


@click.command(short_help="Write a drafter of any format in the canonical one.")
@click.option("--draft", type=Checkpoint(), required=True, help="The drafter.")
@click.option("--output", type=click.Path(path_type=Path), required=True, help="Folder to write; made if needed.")
@click.option(
    "--set",
    "settings",
    type=Setting(),
    multiple=True,
    help="A key to add to its config.json, if that leaves a question open; may be given several times.",
)
def convert(draft: Path, output: Path, settings: tuple[tuple[str, Any], ...]) -> None:
    """Write a drafter of any format in the canonical one, and say what was changed.

    The server reads all formats itself: this is for drafters whose files leave a question open, and for keeping one.
    """
    from sglang_dspark.draft.formats.description import adjustments, describe
    from sglang_dspark.draft.weights import convert as write
    from sglang_dspark.errors import ConfigError

    if output.is_dir() and any(output.iterdir()):
        raise ConfigError(f"--output={output} holds files already; empty it, or name another folder")
    reading = write(draft, output, dict(settings))
    click.echo(f"format     {reading.format}")
    click.echo(f"network    {describe(reading.config)}")
    for adjustment in adjustments(reading):
        click.echo(f"put right  {adjustment}")
    for remark in reading.remarks:
        click.echo(f"{'doubtful' if remark.doubtful else 'left over':10} {remark.sentence}")
    if reading.unknown_keys:
        click.echo(f"unknown    {', '.join(reading.unknown_keys)} (left out)")
    click.echo(f"written    {output}")
