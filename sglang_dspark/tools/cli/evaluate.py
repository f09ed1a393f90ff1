"""``python -m sglang_dspark evaluate``."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sglang_dspark.tools.cli.checkpoint import Checkpoint
from sglang_dspark.tools.cli.outputs import check_folders, check_outputs
from sglang_dspark.tools.cli.progress import progress_bar, progress_bars
from sglang_dspark.tools.cli.protocol import PROTOCOLS, overridden, set_options
from sglang_dspark.tools.cli.template_kwargs import chat_template_kwargs_option, refuse_without_template

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from sglang_dspark.tools.evaluation.measured_set import MeasuredSet

_FILE = click.Path(dir_okay=False, path_type=Path)
_DPI = 150


@click.command(short_help="Accept length, acceptance by position and calibration of a drafter on sets of prompts.")
@click.option("--url", help="A running DSPARK server.  [default: http://127.0.0.1:30000]")
@click.option("--target", type=Checkpoint(), help="Or in this process: the target; also without the Markov head.")
@click.option("--draft", type=Checkpoint(), help="Its drafter.")
@click.option("--prompts", "files", type=_FILE, multiple=True, required=True, help="JSONL, a set each; repeatable.")
@click.option(
    "--protocol",
    type=click.Choice(list(PROTOCOLS)),
    is_eager=True,
    callback=set_options,
    help="Ask as it is published: temperature 1, 2048 tokens, at most 500 prompts of a set, shuffled, no thinking.",
)
@click.option("--limit", type=click.IntRange(min=1), help="Only the first so many prompts of each set.")
@click.option("--shuffle-seed", type=click.IntRange(min=0), help="With --limit: so many at random, by this seed.")
@click.option("--max-tokens", type=click.IntRange(min=2), default=128, show_default=True, help="Longest answer.")
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="0: greedy; in process 0 or 1.",
)
@click.option("--concurrency", type=click.IntRange(min=1), default=8, show_default=True, help="Requests at a time.")
@click.option("--raw", is_flag=True, help="Give the prompts as they are, without the chat template.")
@chat_template_kwargs_option
@click.option("--api-key", help="The server's --api-key.")
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="In process, above temperature 0."
)
@click.option("--output", type=_FILE, help="Where everything goes (JSON).")
@click.option("--csv", "csv_file", type=_FILE, help="Where a line per set goes (CSV).")
@click.option("--plot", type=_FILE, help="Where a figure goes (PNG).")
@click.option("--blocks", "blocks_file", type=_FILE, help="Where the rounds go, for simulate --blocks.")
@click.pass_context
def evaluate(
    ctx: click.Context,
    url: str | None,
    target: Path | None,
    draft: Path | None,
    files: tuple[Path, ...],
    protocol: str | None,
    limit: int | None,
    shuffle_seed: int | None,
    max_tokens: int,
    temperature: float,
    concurrency: int,
    raw: bool,
    chat_template_kwargs: dict[str, Any],
    api_key: str | None,
    seed: int,
    output: Path | None,
    csv_file: Path | None,
    plot: Path | None,
    blocks_file: Path | None,
) -> None:
    """Accept length, acceptance by position and calibration of a drafter on sets of prompts.

    Figures are counted as DeepSpec does; --protocol deepspec also asks as it does. The server has to verify whole
    blocks (--speculative-dspark-schedule static). A set is a JSONL file of {"turns": [text, ...]}, of which the first
    turn is asked; docs/evaluation.md says where the usual ones can be had.
    """
    if (target is None) != (draft is None):
        raise click.UsageError("--target and --draft belong together: give both or neither")
    if target is not None and (url or plot or blocks_file):
        raise click.UsageError("--url, --plot and --blocks are for a server; --target and --draft measure without one")
    if target is not None and temperature not in (0, 1):
        raise click.UsageError(f"--temperature {temperature:g}: in process it is 0 or 1; ask a server with --url")
    refuse_without_template(raw, chat_template_kwargs)

    from rich.console import Console

    from sglang_dspark.tools.prompts import read_prompts

    console = Console(highlight=False)
    check_outputs(output, plot)
    check_folders({"--csv": csv_file, "--blocks": blocks_file})
    sets = {path.stem: read_prompts(path, limit, shuffle_seed) for path in files}
    if len(sets) < len(files):
        raise click.UsageError("two of the --prompts have the same name, which is that of their set; rename one")
    departures = overridden(ctx, protocol)
    if departures:
        console.print(f"with {', '.join(departures)} this is not the protocol of {protocol} any more")
    about = _provenance(
        files,
        name=None if departures else protocol,
        max_tokens=max_tokens,
        temperature=temperature,
        limit=limit,
        shuffle_seed=shuffle_seed,
        raw=raw,
        chat_template_kwargs=chat_template_kwargs,
    )
    if target is not None and draft is not None:
        from dspark_training.in_process import evaluate_in_process

        totals = {"answers written": sum(map(len, sets.values())), "sets measured": len(sets)}
        with progress_bars(console, totals) as (wrote, measured_one):
            results = evaluate_in_process(
                target,
                draft,
                sets,
                temperature=int(temperature),
                max_tokens=max_tokens,
                raw=raw,
                chat_template_kwargs=chat_template_kwargs,
                seed=seed,
                on_written=wrote,
                on_measured=measured_one,
            )
        about |= {"target": target.name, "draft": draft.name}
        console.print(_in_process_table(results))
    else:
        from sglang_dspark.tools.calibrate.trace_client import TraceClient

        address = (url or "http://127.0.0.1:30000").rstrip("/")
        client = TraceClient(address, max_tokens, temperature, raw, chat_template_kwargs, api_key)
        about |= dict(zip(("target", "draft"), client.pair(), strict=True))
        measured = _ask(console, client, sets, concurrency)
        for table in _tables(measured):
            console.print(table)
        results = [one.to_dict() for one in measured]
        title = f"{about['target']} with drafter {about['draft']}, temperature {temperature:g}, {max_tokens} tokens"
        _draw(console, measured, title, plot)
        _keep_blocks(console, measured, title, blocks_file)
    _write(console, about, results, output, csv_file)


def _provenance(files: Sequence[Path], **protocol: Any) -> dict[str, Any]:
    from sglang_dspark.tools import provenance

    return {
        **provenance.record(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "prompts": [{"file": path.name, "sha256": provenance.file_digest(path)} for path in files],
        "protocol": protocol,
    }


def _ask(console: Console, client: Any, sets: dict[str, list[str]], concurrency: int) -> list[MeasuredSet]:
    from sglang_dspark.tools.evaluation.measured_set import MeasuredSet

    gamma = client.block_size()
    measured = []
    with progress_bar(console, "prompts", sum(map(len, sets.values()))) as advance:
        for name, prompts in sets.items():
            measured.append(MeasuredSet.from_answers(name, client.ask_all(prompts, concurrency, advance), gamma))
    return measured


def _tables(measured: Sequence[MeasuredSet]) -> list[Table]:
    columns = (
        "set",
        "answers",
        "rounds",
        "accept length",
        "+-",
        "per verified token",
        "survival by position",
        "given all before",
    )
    main = _new_table("accept length: tokens committed per round, the bonus token included", *columns)
    for one in measured:
        main.add_row(
            one.name,
            str(one.num_answers),
            str(len(one.accepted)),
            f"{one.accept_length:.3f}",
            f"{one.standard_error:.3f}",
            f"{one.verify_rate:.1%}",
            _rates(one.survival),
            _rates(one.conditional),
        )
    with_head = [one for one in measured if one.logits is not None]
    if not with_head:
        return [main]
    thresholds = _new_table(
        "threshold on the raw confidence: tokens committed / verified per round",
        "set",
        *(f"{row['threshold']:.1f}" for row in with_head[0].thresholds()),
    )
    heads = _new_table("raw confidence head, survival by position", "set", "draft", "ECE", "noise", "AUC", "Brier")
    for one in with_head:
        cells = (f"{row['accept_length']:.2f}/{row['verified']:.2f}" for row in one.thresholds())
        thresholds.add_row(one.name, *cells)
        for row in one.confidence():
            area = "-" if row["auc"] is None else f"{row['auc']:.3f}"
            errors = (f"{row['ece']:.1%}", f"{row['ece_noise']:.1%}", area, f"{row['brier']:.4f}")
            heads.add_row(one.name, f"{row['position']}", *errors, end_section=row["position"] == one.gamma)
    return [main, thresholds, heads]


def _in_process_table(results: Sequence[dict[str, Any]]) -> Table:
    columns = ("set", "temperature", "Markov", "proposes", "accept length", "survival by position", "given all before")
    table = _new_table("accept length: tokens committed per round, the bonus token included", *columns)
    for r in results:
        table.add_row(
            r["set"],
            f"{r['temperature']:g}",
            "on" if r["markov"] else "off",
            str(r["proposed_tokens"]),
            f"{r['accept_length']:.3f}",
            _rates(r["survival"]),
            _rates(r["conditional"]),
        )
    return table


def _rates(rates: Sequence[float]) -> str:
    return " ".join(f"{rate:.3f}".removeprefix("0") for rate in rates)


def _new_table(title: str, *headings: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "set" else "right")
    return table


def _draw(console: Console, measured: Sequence[MeasuredSet], title: str, plot: Path | None) -> None:
    if plot is not None:
        from sglang_dspark.tools.evaluation.figure import evaluation_figure

        evaluation_figure(measured, title).savefig(plot, dpi=_DPI)
        console.print(plot, soft_wrap=True)


def _keep_blocks(console: Console, measured: Sequence[MeasuredSet], title: str, path: Path | None) -> None:
    if path is not None:
        from sglang_dspark.tools.evaluation.measured_set import recorded_blocks

        recorded_blocks(measured, title).save(path)
        console.print(path, soft_wrap=True)


def _write(
    console: Console, about: dict[str, Any], results: list[dict[str, Any]], output: Path | None, csv_file: Path | None
) -> None:
    from sglang_dspark.tools import provenance

    if output is not None:
        provenance.write_json(output, {**about, "results": results})
        console.print(output, soft_wrap=True)
    if csv_file is not None:
        rows = [_csv_row(about, result) for result in results]
        with csv_file.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        console.print(csv_file, soft_wrap=True)


def _csv_row(about: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Flat figures of a set: a column per position for what has one."""
    row = {"target": about["target"], "draft": about["draft"], "temperature": about["protocol"]["temperature"]}
    for name, value in result.items():
        if isinstance(value, list | tuple):
            if value and isinstance(value[0], float):
                row |= {f"{name}_{position}": f"{rate:.6g}" for position, rate in enumerate(value, start=1)}
        elif not isinstance(value, dict):
            row[name] = f"{value:.6g}" if isinstance(value, float) else value
    return row
