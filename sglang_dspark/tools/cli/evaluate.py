"""``python -m sglang_dspark evaluate``."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sglang_dspark.tools.cli.asking import DEFAULT_URL, asking_options, refuse_without_template, trace_client
from sglang_dspark.tools.cli.checkpoint import Checkpoint
from sglang_dspark.tools.cli.outputs import OutputFile, new_table, progress_bars

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from sglang_dspark.tools.evaluation.measured_set import MeasuredSet

_PROTOCOLS: Mapping[str, Mapping[str, Any]] = {
    # eval.py and deepspec/eval/base_evaluator.py of DeepSpec
    "deepspec": {
        "temperature": 1.0,
        "max_tokens": 2048,
        "limit": 500,
        "shuffle_seed": 980406,
        "chat_template_kwargs": {"enable_thinking": False},
    }
}
"""A published way of measuring drafters -> the options that it sets."""

_ASKED = ("max_tokens", "temperature", "limit", "shuffle_seed", "raw", "chat_template_kwargs")
"""Options that say how the prompts were asked, as a result records them."""

_DPI = 150
_TITLE = "accept length: tokens committed per round, the bonus token included"
_BY_POSITION = ("survival", "given all before")


def _set_protocol(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Make a protocol's values the defaults of the other options, which are read after this eager one."""
    if value is not None:
        ctx.default_map = {**(ctx.default_map or {}), **_PROTOCOLS[value]}
    return value


@click.command(short_help="Measure accept length, acceptance by position and calibration of a drafter.")
@click.option("--url", help=f"A running DSPARK server.  [default: {DEFAULT_URL}]")
@click.option("--target", type=Checkpoint(), help="Measure in this process instead: the target.")
@click.option("--draft", type=Checkpoint(), help="Its drafter, which is measured without its Markov head as well.")
@click.option(
    "--prompts", "files", type=click.Path(path_type=Path), multiple=True, required=True, help="Prompt file; repeatable."
)
@click.option(
    "--protocol",
    type=click.Choice(list(_PROTOCOLS)),
    is_eager=True,
    callback=_set_protocol,
    help="Ask as published: temperature 1, 2048 tokens, at most 500 prompts of a set, shuffled, no thinking.",
)
@click.option("--limit", type=click.IntRange(min=1), help="Ask only the first so many prompts of each set.")
@click.option("--shuffle-seed", type=click.IntRange(min=0), help="With --limit: choose them at random by this seed.")
@asking_options
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of sampling, in process only."
)
@click.option("--output", type=OutputFile(), help="JSON file of all results.")
@click.option("--csv", "csv_file", type=OutputFile(), help="CSV file with a line per set.")
@click.option("--plot", type=OutputFile(is_figure=True), help="PNG file of a figure.")
@click.option("--blocks", "blocks_file", type=OutputFile(), help="File of the rounds, for simulate --blocks.")
def evaluate(files: tuple[Path, ...], protocol: str | None, **options: Any) -> None:
    """Measure accept length, acceptance by position and calibration of a drafter on sets of prompts.

    Figures are counted as DeepSpec counts them; --protocol deepspec also asks as it does. The server has to verify
    whole blocks (--speculative-dspark-schedule static). A set is a file of prompts or conversations, of which the
    first turn is asked; docs/evaluation.md says where to find the usual ones.
    """
    _refuse(options)

    from rich.console import Console

    from sglang_dspark.tools import provenance
    from sglang_dspark.tools.prompts import read_prompts

    console = Console(highlight=False)
    sets = {path.stem: read_prompts(path, options["limit"], options["shuffle_seed"]) for path in files}
    if len(sets) < len(files):
        raise click.UsageError("two files of --prompts have the same name, which names their set; rename one")
    departures = [f"--{name.replace('_', '-')}" for name, value in _wanted(protocol) if options[name] != value]
    if departures:
        console.print(f"with {', '.join(departures)} this is not the protocol of {protocol} any more")
    about = {
        **provenance.record(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "prompts": provenance.files(files),
        "protocol": {"name": None if departures else protocol} | {name: options[name] for name in _ASKED},
    }
    measure = _on_server if options["target"] is None else _in_process
    pair, results = measure(console, sets, options)
    about |= pair
    if options["output"] is not None:
        provenance.write_json(options["output"], {**about, "results": results})
        console.print(options["output"], soft_wrap=True)
    if options["csv_file"] is not None:
        _write_csv(options["csv_file"], about, results)
        console.print(options["csv_file"], soft_wrap=True)


def _refuse(options: Mapping[str, Any]) -> None:
    """Refuse options that do not go together."""
    in_process = options["target"] is not None
    if in_process != (options["draft"] is not None):
        raise click.UsageError("--target and --draft belong together: give both or neither")
    if in_process and (options["url"] or options["plot"] or options["blocks_file"]):
        raise click.UsageError("--url, --plot and --blocks are for a server; --target and --draft measure without one")
    if in_process and options["temperature"] not in (0, 1):
        raise click.UsageError(f"--temperature {options['temperature']:g}: in process it is 0 or 1; ask a server")
    refuse_without_template(options)


def _wanted(protocol: str | None) -> Sequence[tuple[str, Any]]:
    return () if protocol is None else tuple(_PROTOCOLS[protocol].items())


_Measured = tuple[dict[str, str], list[dict[str, Any]]]
"""Names of target and drafter, and the figures of every set."""


def _in_process(console: Console, sets: dict[str, list[str]], options: Mapping[str, Any]) -> _Measured:
    from dspark_training.in_process import evaluate_in_process

    totals = {"answers written": sum(map(len, sets.values())), "sets measured": len(sets)}
    with progress_bars(console, totals) as (wrote, measured_one):
        results = evaluate_in_process(
            options["target"],
            options["draft"],
            sets,
            temperature=int(options["temperature"]),
            max_tokens=options["max_tokens"],
            raw=options["raw"],
            chat_template_kwargs=options["chat_template_kwargs"],
            seed=options["seed"],
            on_written=wrote,
            on_measured=measured_one,
        )
    main = new_table("set", "temperature", "Markov", "proposes", "accept length", title=_TITLE, left=["set"])
    positions = new_table("set", "Markov", "draft", *_BY_POSITION, left=["set"])
    for r in results:
        markov = "on" if r["markov"] else "off"
        main.add_row(r["set"], f"{r['temperature']:g}", markov, f"{r['proposed_tokens']}", f"{r['accept_length']:.3f}")
        for draft, rates in enumerate(zip(r["survival"], r["conditional"], strict=True), start=1):
            positions.add_row(r["set"], markov, str(draft), *(f"{rate:.3f}" for rate in rates))
        positions.add_section()
    for table in (main, positions):
        console.print(table)
    return {"target": options["target"].name, "draft": options["draft"].name}, results


def _on_server(console: Console, sets: dict[str, list[str]], options: Mapping[str, Any]) -> _Measured:
    from sglang_dspark.tools.evaluation.measured_set import MeasuredSet, recorded_blocks

    client, measured = trace_client(options), []
    (target, draft), gamma = client.pair(), client.block_size()
    with progress_bars(console, {"prompts": sum(map(len, sets.values()))}) as (advance,):
        for name, prompts in sets.items():
            answers = client.ask_all(prompts, options["concurrency"], advance)
            measured.append(MeasuredSet.from_answers(name, answers, gamma))
    for table in _tables(measured):
        console.print(table)
    title = f"{target} with drafter {draft}, temperature {options['temperature']:g}, {options['max_tokens']} tokens"
    if options["plot"] is not None:
        from sglang_dspark.tools.evaluation.figure import evaluation_figure

        evaluation_figure(measured, title).savefig(options["plot"], dpi=_DPI)
        console.print(options["plot"], soft_wrap=True)
    if options["blocks_file"] is not None:
        recorded_blocks(measured, title).save(options["blocks_file"])
        console.print(options["blocks_file"], soft_wrap=True)
    return {"target": target, "draft": draft}, [one.to_dict() for one in measured]


def _tables(measured: Sequence[MeasuredSet]) -> list[Table]:
    columns = ("set", "answers", "rounds", "accept length", "+-", "per verified token")
    main = new_table(*columns, title=_TITLE, left=["set"])
    for one in measured:
        counts = (str(one.num_answers), str(len(one.accepted)))
        figures = (f"{one.accept_length:.3f}", f"{one.standard_error:.3f}", f"{one.verify_rate:.1%}")
        main.add_row(one.name, *counts, *figures)
    with_head = [one for one in measured if one.logits is not None]
    if not with_head:
        return [main, _position_table(measured)]
    title = "threshold on the raw confidence: tokens per round"
    thresholds = new_table("set", "threshold", "committed", "verified", title=title, left=["set"])
    for one in with_head:
        for row in one.thresholds():
            tokens = (f"{row['accept_length']:.2f}", f"{row['verified']:.2f}")
            thresholds.add_row(one.name, f"{row['threshold']:.1f}", *tokens)
        thresholds.add_section()
    return [main, _position_table(measured), thresholds]


def _position_table(measured: Sequence[MeasuredSet]) -> Table:
    """Return a row per set and draft; errors of the raw head's survival are left out without a head."""
    heads = ("ECE", "noise", "AUC", "Brier") if any(one.logits is not None for one in measured) else ()
    table = new_table("set", "draft", *_BY_POSITION, *heads, left=["set"])
    for one in measured:
        errors = [_head_errors(row) for row in one.confidence()] or [()] * one.gamma
        for draft, (*rates, cells) in enumerate(zip(one.survival, one.conditional, errors, strict=True), start=1):
            table.add_row(one.name, str(draft), *(f"{rate:.3f}" for rate in rates), *cells)
        table.add_section()
    return table


def _head_errors(row: Mapping[str, Any]) -> tuple[str, ...]:
    area = "-" if row["auc"] is None else f"{row['auc']:.3f}"
    return f"{row['ece']:.1%}", f"{row['ece_noise']:.1%}", area, f"{row['brier']:.4f}"


def _write_csv(path: Path, about: dict[str, Any], results: list[dict[str, Any]]) -> None:
    rows = [_csv_row(about, result) for result in results]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _csv_row(about: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Return the flat figures of a set: a column per position for what has one."""
    row = {"target": about["target"], "draft": about["draft"], "temperature": about["protocol"]["temperature"]}
    for name, value in result.items():
        if isinstance(value, list | tuple):
            if value and isinstance(value[0], float):
                row |= {f"{name}_{position}": f"{rate:.6g}" for position, rate in enumerate(value, start=1)}
        elif not isinstance(value, dict):
            row[name] = f"{value:.6g}" if isinstance(value, float) else value
    return row
