"""``python -m sglang_dspark doctor``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sglang_dspark.tools.cli.checkpoint import Checkpoint

if TYPE_CHECKING:
    from sglang_dspark.tools.doctor import Finding

_MARKS = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "fail": "[bold red]fail[/]"}


@click.command(short_help="Say whether this installation can serve, and whether a drafter fits a target.")
@click.option("--target", type=Checkpoint(), help="The target model.")
@click.option("--draft", type=Checkpoint(), help="Its drafter.")
@click.option("--hooks", is_flag=True, help="Also look at every function of SGLang that is patched, and say why it is.")
@click.argument("flags", nargs=-1)
def doctor(target: Path | None, draft: Path | None, hooks: bool, flags: tuple[str, ...]) -> None:
    """Say whether this installation can serve, and whether a drafter fits a target.

    With FLAGS of sglang.launch_server behind "--", also what DSPARK changes of them. Ends with exit status 1 when
    something stands in the way.
    """
    if (target is None) != (draft is None):
        raise click.UsageError("--target and --draft belong together: give both or neither")

    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table.grid(padding=(0, 2))
    findings = []
    with console.status("importing SGLang and running the checks"):
        for finding in _diagnose(target, draft, flags, hooks=hooks):
            findings.append(finding)
            table.add_row(_MARKS[finding.status], finding.subject, _text(finding))
    console.print(table)
    if num_failed := sum(finding.status == "fail" for finding in findings):
        console.print(f"\n[bold red]{num_failed} of {len(findings)} checks failed.[/]")
        raise SystemExit(1)
    console.print("\n[green]Ready.[/]")
    if target is not None and draft is not None:
        console.print(_command(_flags(target, draft, flags)), soft_wrap=True)


def _flags(target: Path, draft: Path, others: tuple[str, ...]) -> list[str]:
    """Return flags of a server of the pair on this machine."""
    import torch

    from sglang_dspark.tools.launch import dspark_flags

    device = () if torch.cuda.is_available() else ("--device", "cpu")
    return ["--model-path", str(target), *dspark_flags(draft), *device, *others]


def _command(flags: list[str]) -> str:
    """Return the command of a server with these flags."""
    from sglang_dspark.on_cpu import VARIABLE

    variable = f"{VARIABLE}=1 " if "--device" in flags else ""
    return f"{variable}python -m sglang.launch_server {' '.join(flags)}"


def _diagnose(target: Path | None, draft: Path | None, flags: tuple[str, ...], *, hooks: bool) -> Iterator[Finding]:
    from sglang_dspark.on_cpu import VARIABLE
    from sglang_dspark.tools.doctor.installation import check_device, check_hooks, check_plugin, check_versions

    if target is not None and draft is not None:
        with suppress(ImportError):  # of torch, which check_device reports
            if "--device" in _flags(target, draft, flags):
                os.environ.setdefault(VARIABLE, "1")  # as in the command; SGLang reads it once
    yield from check_versions()
    yield from check_plugin()
    if hooks:
        yield from check_hooks()
    yield from check_device()
    if target is not None and draft is not None:
        from sglang_dspark.tools.doctor.models import check_pair

        yield from check_pair(target, draft, _flags(target, draft, flags))


def _text(finding: Finding) -> str:
    from rich.markup import escape

    remedy = f"\n[dim]{escape(finding.remedy)}[/]" if finding.remedy else ""
    return escape(finding.found) + remedy
