"""``python -m sglang_dspark profile``."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sglang_dspark.errors import ConfigError
from sglang_dspark.tools.cli.outputs import OutputFile, new_table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from sglang_dspark.scheduling.sps_table import SpsTable


@click.command(
    short_help="Measure how long decode steps take on this machine and print the table.",
    context_settings={"ignore_unknown_options": True},
)
@click.option("--target", help="Target to measure, as --model-path: a server is started with it.")
@click.option("--draft", help="Its drafter, as --speculative-draft-model-path.")
@click.option("--output", type=OutputFile(), help="File of the table, for --speculative-dspark-sps-table-path.")
@click.option(
    "--table", "table_file", type=click.Path(path_type=Path), help="Print this table instead of measuring one."
)
@click.argument("server_flags", nargs=-1, type=click.UNPROCESSED)
def profile(
    target: str | None,
    draft: str | None,
    output: Path | None,
    table_file: Path | None,
    server_flags: tuple[str, ...],
) -> None:
    """Measure how long decode steps take on this machine and print the table.

    A server measures its own table when it starts; this does the same ahead of time, for a server that shall start
    faster or a machine that is busy later. SERVER_FLAGS have to be those of that server, e.g. --dtype bfloat16: a table
    holds for one setting.
    """
    from rich.console import Console

    from sglang_dspark.scheduling.sps_table import SpsTable

    console = Console(highlight=False)
    if table_file is not None:
        if target or draft or output or server_flags:
            raise click.UsageError("--table prints a table; drop everything that measures one")
        table = SpsTable.load(table_file)
    elif target is None or draft is None:
        raise click.UsageError("give --target and --draft to measure, or --table to print")
    else:
        with tempfile.TemporaryDirectory() as folder:
            path = output or Path(folder) / "sps.json"
            if path.exists():
                raise ConfigError(f"--output={str(path)!r} exists; remove it, or print it with --table")
            _measure(console, target, draft, path, server_flags)
            table = SpsTable.load(path)
    for index in range(len(table.contexts)):
        console.print(_table(table, index))
    if output is not None:
        console.print(f"\n--speculative-dspark-sps-table-path {output}", soft_wrap=True)


def _measure(console: Console, target: str, draft: str, output: Path, server_flags: tuple[str, ...]) -> None:
    import torch

    from sglang_dspark.config import flag_name
    from sglang_dspark.tools.launch import CPU_DEVICE_FLAGS, LaunchedServer, dspark_flags

    on_gpu = torch.cuda.is_available()
    device_flags, env = ((), {}) if on_gpu else (CPU_DEVICE_FLAGS, {"SGLANG_USE_CPU_ENGINE": "1"})
    flags = (*device_flags, *dspark_flags(draft), flag_name("sps_table_path"), str(output.resolve()), *server_flags)
    with console.status("starting a server") as status:

        def progress(seconds: float, line: str) -> None:
            status.update(f"{seconds:.0f} s  {line[:100]}")

        with LaunchedServer(target, *flags, env=env, progress=progress):
            pass


def _table(table: SpsTable, context: int) -> Table:
    """Return rows of requests and columns of verified drafts, in milliseconds."""
    title = f"ms at {table.contexts[context]} tokens of context: plain step, draft of a block, verification of n drafts"
    shown = new_table("users", "plain", "draft", *(f"v {drafts}" for drafts in table.drafts[1:]), title=title)
    for r, requests in enumerate(table.requests):
        plain, *verify = table.verify_ms[r, :, context]
        row = [plain, table.draft_ms[r, -1, context], *verify]
        shown.add_row(str(requests), *(f"{ms:.1f}" for ms in row))
    return shown
