"""Commands that ask a model: ``evaluate``, ``calibrate`` and ``vocabulary``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sglang_dspark.tools.cli.options import (
    DEFAULT_URL,
    Checkpoint,
    OutputFile,
    asking_options,
    new_table,
    progress_bars,
    refuse_without_template,
    trace_client,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from sglang_dspark.scheduling.sts import Bools, Errors, Floats
    from sglang_dspark.tools.evaluation import MeasuredSet


_ASKED = ("max_tokens", "temperature", "limit", "shuffle_seed", "raw", "chat_template_kwargs")
"""Options that say how the prompts were asked, as a result records them."""

_TITLE = "accept length: tokens committed per round, the bonus token included"
_BY_POSITION = ("survival", "given all before")


@click.command(short_help="Measure how well a drafter guesses on your prompts, on a running server or without one.")
@click.option("--url", help=f"A running DSPARK server.  [default: {DEFAULT_URL}]")
@click.option("--target", type=Checkpoint(), help="Measure without a server: the target.")
@click.option("--draft", type=Checkpoint(), help="With --target: its drafter, measured with and without Markov head.")
@click.option(
    "--draft-vocabulary",
    type=click.Path(path_type=Path),
    help="With --target: file of the tokens that the drafter proposes, from the command vocabulary.",
)
@click.option(
    "--draft-quantization", type=click.Choice(["int8"]), help="With --target: the drafter in 8 bits, as on a server."
)
@click.option(
    "--prompts", "files", type=click.Path(path_type=Path), multiple=True, required=True, help="Prompt file; repeatable."
)
@click.option("--limit", type=click.IntRange(min=1), help="Ask only so many prompts of each file.")
@click.option("--shuffle-seed", type=click.IntRange(min=0), help="With --limit: choose the prompts with this seed.")
@asking_options
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="With --target: seed of sampling."
)
@click.option("--output", type=OutputFile(), help="Write all results to this JSON file.")
@click.option("--blocks", "blocks_file", type=OutputFile(), help="Write rounds to this file, for simulate --blocks.")
def evaluate(files: tuple[Path, ...], **options: Any) -> None:
    """Measure how well a drafter guesses on your prompts, on a running server or without one.

    Prints accept length, acceptance by position, and how well the confidence head predicts it, as DeepSpec counts
    them. The server has to verify whole blocks (--speculative-dspark-schedule static). A set is a file of prompts or
    conversations, of which the first turn is asked. docs/evaluation.md explains the figures and DeepSpec's protocol.
    """
    _refuse(options)

    from rich.console import Console

    from sglang_dspark.tools import provenance
    from sglang_dspark.tools.prompts import read_prompts

    console = Console(highlight=False)
    sets = {path.stem: read_prompts(path, options["limit"], options["shuffle_seed"]) for path in files}
    if len(sets) < len(files):
        raise click.UsageError("two files of --prompts have the same name, by which results name their set; rename one")
    about = {
        **provenance.record(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "prompts": provenance.files(files),
        "protocol": {name: options[name] for name in _ASKED},
    }
    if (listed := options["draft_vocabulary"]) is not None:
        about["draft_vocabulary"] = provenance.files([listed])
    measure = _on_server if options["target"] is None else _in_process
    pair, results = measure(console, sets, options)
    about |= pair
    if options["output"] is not None:
        provenance.write_json(options["output"], {**about, "results": results})
        console.print(options["output"], soft_wrap=True)


def _refuse(options: Mapping[str, Any]) -> None:
    """Refuse options that do not go together."""
    in_process = options["target"] is not None
    if in_process != (options["draft"] is not None):
        raise click.UsageError("--target and --draft belong together: give both or neither")
    for name in ("draft_vocabulary", "draft_quantization"):
        if options[name] is not None and not in_process:
            flag = name.replace("_", "-")
            raise click.UsageError(f"--{flag} is for --target and --draft; a server has --speculative-dspark-{flag}")
    if in_process and (options["url"] or options["blocks_file"]):
        raise click.UsageError("--url and --blocks are for a server; --target and --draft measure without one")
    if in_process and options["temperature"] not in (0, 1):
        raise click.UsageError(
            f"--temperature {options['temperature']:g}: with --target it is 0 or 1; pass one of them, or ask a server"
        )
    refuse_without_template(options)


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
            listed=options["draft_vocabulary"],
            eight_bits=options["draft_quantization"] == "int8",
            on_written=wrote,
            on_measured=measured_one,
        )
    headings = ("set", "temperature", "Markov", "weights", "proposes", "accept length")
    main = new_table(*headings, title=_TITLE, left=["set"])
    positions = new_table("set", "Markov", "draft", *_BY_POSITION, left=["set"])
    for r in results:
        markov = "on" if r["markov"] else "off"
        weights, figures = r["quantization"] or "-", (f"{r['proposed_tokens']}", f"{r['accept_length']:.3f}")
        main.add_row(r["set"], f"{r['temperature']:g}", markov, weights, *figures)
        for draft, rates in enumerate(zip(r["survival"], r["conditional"], strict=True), start=1):
            positions.add_row(r["set"], markov, str(draft), *(f"{rate:.3f}" for rate in rates))
        positions.add_section()
    for table in (main, positions):
        console.print(table)
    return {"target": options["target"].name, "draft": options["draft"].name}, results


def _on_server(console: Console, sets: dict[str, list[str]], options: Mapping[str, Any]) -> _Measured:
    from sglang_dspark.tools.evaluation import MeasuredSet, recorded_blocks

    client, measured = trace_client(options), []
    (target, draft), gamma = client.pair(), client.block_size()
    with progress_bars(console, {"prompts": sum(map(len, sets.values()))}) as (advance,):
        for name, prompts in sets.items():
            answers = client.ask_all(prompts, options["concurrency"], advance)
            measured.append(MeasuredSet.from_answers(name, answers, gamma))
    for table in _tables(measured):
        console.print(table)
    title = f"{target} with drafter {draft}, temperature {options['temperature']:g}, {options['max_tokens']} tokens"
    if options["blocks_file"] is not None:
        recorded_blocks(measured, title).save(options["blocks_file"])
        console.print(options["blocks_file"], soft_wrap=True)
    return {"target": target, "draft": draft}, [one.to_dict() for one in measured]


def _tables(measured: Sequence[MeasuredSet]) -> list[Table]:
    """Return a row per set, and one per set and draft, with errors of the raw head's survival if there is a head."""
    columns = ("set", "answers", "rounds", "accept length", "+-", "per verified token")
    main = new_table(*columns, title=_TITLE, left=["set"])
    heads = ("ECE", "noise", "AUC", "Brier") if any(one.logits is not None for one in measured) else ()
    table = new_table("set", "draft", *_BY_POSITION, *heads, left=["set"])
    for one in measured:
        counts = (str(one.num_answers), str(len(one.accepted)))
        figures = (f"{one.accept_length:.3f}", f"{one.standard_error:.3f}", f"{one.verify_rate:.1%}")
        main.add_row(one.name, *counts, *figures)
        errors = [_head_errors(row) for row in one.confidence()] or [()] * one.gamma
        for draft, (*rates, cells) in enumerate(zip(one.survival, one.conditional, errors, strict=True), start=1):
            table.add_row(one.name, str(draft), *(f"{rate:.3f}" for rate in rates), *cells)
        table.add_section()
    return [main, table]


def _head_errors(row: Mapping[str, Any]) -> tuple[str, ...]:
    area = "-" if row["auc"] is None else f"{row['auc']:.3f}"
    return f"{row['ece']:.1%}", f"{row['ece_noise']:.1%}", area, f"{row['brier']:.4f}"


_SHARE = click.FloatRange(0, 1, min_open=True, max_open=True)


@click.command(short_help="Calibrate a drafter's confidence head on a running server, for its next start.")
@click.option("--url", default=DEFAULT_URL, show_default=True, help="The running DSPARK server.")
@click.option("--prompts", type=click.Path(path_type=Path), required=True, help="Prompt file.")
@click.option("--limit", type=click.IntRange(min=2), help="Ask only so many prompts of the file.")
@asking_options
@click.option("--held-out", type=_SHARE, default=0.3, show_default=True, help="Share of the prompts to test on.")
@click.option("--output", type=OutputFile(), required=True, help="Write the temperatures to this JSON file.")
def calibrate(prompts: Path, held_out: float, output: Path, **options: Any) -> None:
    """Calibrate a drafter's confidence head on a running server, for its next start.

    The command asks the server the prompts, compares how often each draft survived verification with what the head
    predicted, and fits a temperature for each position (Sequential Temperature Scaling). It writes a file for
    --speculative-dspark-confidence-sts-path. The server has to verify whole blocks (--speculative-dspark-schedule
    static). Errors are measured on prompts that were not fitted.
    """
    refuse_without_template(options)

    from rich.console import Console

    from sglang_dspark.errors import ConfigError
    from sglang_dspark.scheduling.sts import StsCalibration, fit_sts
    from sglang_dspark.tools.evaluation import MeasuredSet
    from sglang_dspark.tools.prompts import read_prompts

    console = Console(highlight=False)
    texts, client = read_prompts(prompts, options["limit"]), trace_client(options)
    (target, drafter), gamma = client.pair(), client.block_size()
    with progress_bars(console, {"prompts": len(texts)}) as (advance,):
        answers = client.ask_all(texts, options["concurrency"], advance)
    rounds = MeasuredSet.from_answers(prompts.name, answers, gamma)
    if rounds.logits is None:
        raise ConfigError(
            f"--url {client.server.url}: the drafter has no confidence head, so there is nothing to calibrate; serve a "
            "drafter with one (sglang-dspark doctor says what a drafter has)"
        )
    test = rounds.held_out(held_out)
    fit_logits, fit_accepted = rounds.logits[~test], rounds.accepted[~test]
    with console.status("fitting temperatures"):
        temperatures = fit_sts(fit_logits, fit_accepted)
    logits, outcomes = rounds.logits[test], rounds.outcomes[test]
    before, after = (_errors(z, outcomes) for z in (logits, logits / temperatures))
    pairs = [len(outcomes), *outcomes.sum(axis=0)[:-1].tolist()]
    console.print(_table(temperatures, pairs, before, after))
    console.print(
        f"Errors of the predicted survival of each draft. The temperatures T are fitted to {len(fit_logits)} rounds, "
        f"and errors are measured on {len(logits)} rounds of other prompts. pairs: rounds that tested the draft. "
        "noise: about the ECE of perfect predictions on as many rounds."
    )
    StsCalibration(
        tuple(temperatures.tolist()),
        target=target,
        draft=drafter,
        dataset=prompts.name,
        num_samples=len(fit_logits),
        ece_before=tuple(position.ece for position in before),
        ece_after=tuple(position.ece for position in after),
    ).save(output)
    console.print(f"\n--speculative-dspark-confidence-sts-path {output}", soft_wrap=True)


def _errors(logits: Floats, outcomes: Bools) -> list[Errors]:
    """Return the errors of the survivals that logits [n, gamma] predict, by position."""
    from sglang_dspark.scheduling.sts import errors, prefix_survival, sigmoid

    return [errors(*column) for column in zip(prefix_survival(sigmoid(logits)).T, outcomes.T, strict=True)]


def _table(temperatures: Floats, pairs: list[int], before: list[Errors], after: list[Errors]) -> Table:
    headings = ("draft", "pairs", "T", "ECE\nbefore", "ECE\nafter", "ECE\nnoise", "AUC")
    table = new_table(*headings, "Brier\nbefore", "Brier\nafter")
    rows = zip(temperatures, pairs, before, after, strict=True)
    for draft, (temperature, num_pairs, raw, scaled) in enumerate(rows, start=1):
        table.add_row(
            str(draft),
            str(num_pairs),
            f"{temperature:.3f}",
            *(f"{ece:.2%}" for ece in (raw.ece, scaled.ece, scaled.ece_noise)),
            "-" if scaled.auc is None else f"{scaled.auc:.3f}",
            f"{raw.brier:.4f}",
            f"{scaled.brier:.4f}",
        )
    return table


@click.command(short_help="Make drafting cheaper: choose the tokens that a drafter proposes, from your traffic.")
@click.option("--target", type=Checkpoint(), required=True, help="The target model.")
@click.option(
    "--prompts",
    "files",
    type=click.Path(path_type=Path),
    multiple=True,
    required=True,
    help="File of conversations or prompts; repeatable.",
)
@click.option("--url", help="Also ask this running DSPARK server of the target the first prompt of each row.")
@click.option("--limit", type=click.IntRange(min=1), help="With --url: ask only so many prompts of each file.")
@asking_options
@click.option("--size", type=click.IntRange(min=1), default=32_768, show_default=True, help="Number of tokens.")
@click.option("--output", type=OutputFile(), required=True, help="Write the tokens to this JSON file.")
def vocabulary(target: Path, files: tuple[Path, ...], size: int, output: Path, **options: Any) -> None:
    """Make drafting cheaper: choose the tokens that a drafter proposes, from your traffic.

    The list has, in this order: special tokens; the most frequent tokens of answers; those of the users' texts; single
    bytes; the tokenizer's first tokens. Answers are what assistants say in the conversations, and with --url what the
    server answers.

    The file is for --speculative-dspark-draft-vocabulary. A shorter list makes drafting cheaper, but a block of drafts
    ends where the target writes a token that is not listed. Texts are the same with any list.
    """
    refuse_without_template(options)

    from rich.console import Console
    from transformers import AutoTokenizer

    from sglang_dspark.draft.reduced_vocabulary import Tokens, Traffic, coverage, save_token_ids
    from sglang_dspark.errors import ConfigError
    from sglang_dspark.tools.prompts import conversations_of, read_answers, read_prompts, read_rows

    console = Console(highlight=False)
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokens = Tokens.of(tokenizer, target)
    if not len(tokens.special) < size <= tokens.number:
        raise ConfigError(
            f"--size {size}: the target has {tokens.number} tokens, {len(tokens.special)} of them special, which are "
            f"always listed; give more than {len(tokens.special)} and at most {tokens.number}"
        )

    def ids_of(texts: list[str]) -> list[list[int]]:
        return tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []

    asked = [turn for file in files for turns in conversations_of(read_rows(file), str(file)) for turn in turns]
    answers = ids_of([text for file in files for text in read_answers(file)])
    if options["url"] is not None:
        prompts = [prompt for file in files for prompt in read_prompts(file, options["limit"])]
        with progress_bars(console, {"prompts": len(prompts)}) as (advance,):
            done = trace_client(options).ask_all(prompts, options["concurrency"], advance)
        answers += [answer.tokens for answer in done]
    traffic = Traffic(answers, ids_of(asked))
    chosen = traffic.choose(tokens, size)
    save_token_ids(output, chosen)
    of_all, of_others = coverage(chosen, answers), traffic.held_out_coverage(tokens, size)
    says = f"The list has {size:,} of {tokens.number:,} tokens; it was chosen from {len(answers):,} answers and "
    says += f"{len(asked):,} texts of users."
    if of_all is None:
        says += " Without answers the list may miss what the target writes: give conversations with answers, or --url."
    else:
        says += f" It covers {of_all:.2%} of the tokens of these answers."
    if of_others is not None:
        says += f" Chosen in the same way from nine tenths of them, it covers {of_others:.2%} of the other tenth."
    console.print(says)
    console.print(f"\n--speculative-dspark-draft-vocabulary {output}", soft_wrap=True)
