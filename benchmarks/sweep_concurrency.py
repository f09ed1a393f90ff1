r"""Measure plain serving and DSPARK policies side by side, at several loads, on one set of prompts.

    python benchmarks/sweep_concurrency.py --target TARGET --draft DRAFT --prompts PROMPTS.jsonl --output RESULTS \
        --config plain --config auto --config static:3 --concurrency 1,2,4,8 --rounds 6

A configuration is ``[NAME=]POLICY[:ARGUMENT][@DTYPE] [VARIABLE=VALUE ...] [SERVER FLAGS]``: ``static:3@float32``,
``"small=static:5 --speculative-dspark-block-size 5"``; POLICY is ``plain``, a DSPARK policy, or ``builtin`` (SGLang's
own DSPARK, on CUDA). Other algorithms of SGLang are flags of a plain server: ``"ngram=plain --speculative-algorithm
NGRAM"``. The same one under two names (``--config plain --config again=plain``) shows how much is noise.

DSPARK configurations with equal flags share one server, which is told its policy before each cell. Every server is
started once, one after the other, or ``--together``. All configurations run one after another on the same prompts
before the next number of users and then the next round, so that drift of the machine meets all of them alike; idle
servers are suspended. A user waits for the answer before the next prompt: the load follows the server. For arrivals at
a given rate, and goodput, there is SGLang's own benchmark.

RESULTS gets ``sweep.csv`` (one row per configuration, load and round), ``requests.jsonl`` (every answer with its times)
and ``provenance.json``, with ``--trace-steps`` also traces. Servers that keep drafts at the same rates and verify whole
blocks take the same steps for every request; if they do not, the sweep ends. Run again after an interruption, it goes
on where it stopped. Read the results with paired_ratio.py and report.py.
"""

from __future__ import annotations

import signal
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
from paired_ratio import frame_baselines, paired_ratios, ratio_table, summarise
from rich.console import Console
from serving.client import Sampling
from serving.configurations import GRAMMAR, parse_configurations
from serving.results import read_sweep
from serving.schedule import USERS
from serving.sweep import PROMPTS_PER_USER, Sweep, run_sweep

from sglang_dspark.errors import DSparkError


@click.command(help="Measure plain serving and DSPARK policies side by side, at several loads, on one set of prompts.")
@click.option("--target", required=True, help="Target checkpoint.")
@click.option("--draft", help="DSPARK draft checkpoint, for configurations that speculate.")
@click.option("--config", "configs", multiple=True, metavar="CONFIG", help=f"{GRAMMAR}. Repeatable.")
@click.option("--dtype", default="bfloat16", show_default=True, help="Of configurations that name none.")
@click.option("--concurrency", "users", default="1,2,4,8", show_default=True, type=USERS, help="Numbers of users.")
@click.option("--rounds", "num_rounds", default=4, show_default=True, type=click.IntRange(1), help="Recorded rounds.")
@click.option(
    "--prompts",
    required=True,
    multiple=True,
    type=click.Path(path_type=Path),
    help='JSONL of {"turns": [text, ...]}; several files take turns.',
)
@click.option(
    "--num-prompts",
    default=8,
    show_default=True,
    type=click.IntRange(1),
    help=f"Prompts per round, at least; {PROMPTS_PER_USER} per user, if that is more.",
)
@click.option("--max-tokens", default=128, show_default=True, type=click.IntRange(1), help="Longest answer.")
@click.option("--temperature", default=0.0, show_default=True, type=click.FloatRange(0), help="0 is greedy.")
@click.option("--ignore-eos", is_flag=True, help="Answers of --max-tokens tokens: no tail of a few long ones.")
@click.option("--raw-prompts", "raw", is_flag=True, help="Send the text as it is, without the chat template.")
@click.option("--device", default="cpu", show_default=True, type=click.Choice(["cpu", "cuda"]))
@click.option("--server-flags", default="", help="Further arguments of every server, as one text.")
@click.option("--together", is_flag=True, help="Start all servers at once, and do without those that fail.")
@click.option(
    "--trace-steps", default=0, type=click.IntRange(0), help="Record so many decode steps, for step_trace.py."
)
@click.option("--output", required=True, type=click.Path(file_okay=False, path_type=Path), help="Folder for results.")
def main(configs: tuple[str, ...], dtype: str, server_flags: str, output: Path, **options: Any) -> None:
    """Run the command line; see the module."""
    # Texts and labels may look like markup.
    console = Console(width=None if sys.stdout.isatty() else 160, markup=False, emoji=False)
    # Python ends on SIGTERM without unwinding, which would leave suspended servers behind.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sampling = Sampling(**{field.name: options.pop(field.name) for field in fields(Sampling)})
    try:
        configurations = parse_configurations(configs, dtype)
        sweep = Sweep(
            **options, configurations=configurations, sampling=sampling, server_flags=tuple(server_flags.split())
        )
        run_sweep(sweep, output, console)
        frame = read_sweep(output / "sweep.csv")
        summary = summarise(paired_ratios(frame, "output_tok_s", frame_baselines(frame)))
    except DSparkError as error:
        raise click.ClickException(str(error)) from error
    if not summary.empty:
        console.print(ratio_table(summary, "output_tok_s"))
    console.print(f"Tables and a figure: python benchmarks/report.py {output}", highlight=False)


if __name__ == "__main__":
    main()
