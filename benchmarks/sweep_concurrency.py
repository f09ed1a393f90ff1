r"""Measure plain serving and DSPARK policies side by side, at several loads, on one set of prompts.

    python benchmarks/sweep_concurrency.py --target TARGET --draft DRAFT --prompts PROMPTS.jsonl --output RESULTS \
        --config plain --config auto --config static:3 --concurrency 1,2,4,8 --rate 0.5,1,2 \
        --sla-ttft-ms 500 --sla-tpot-ms 50 --rounds 6

A configuration is ``[NAME=]POLICY[:ARGUMENT][@DTYPE] [VARIABLE=VALUE ...] [SERVER FLAGS]``: ``static:3@float32``,
``"small=static:5 --speculative-dspark-block-size 5"``; POLICY is ``plain``, a DSPARK policy, or ``builtin`` (SGLang's
own DSPARK, on CUDA; ``builtin:compact`` with a table of its own among the flags). Other algorithms of SGLang are flags
of a plain server: ``"ngram=plain --speculative-algorithm NGRAM"``. The same one under two names (``--config plain
--config again=plain``) shows how much of a difference is noise.

A load is a number of users that wait for their answers (``--concurrency``, closed loop), or requests per second that
arrive as a Poisson process whatever the server does (``--rate``, open loop).

DSPARK configurations with equal flags share one server, which is told its policy before each cell. Every server is
started once, one after the other. All configurations run one after another on the same prompts (and arrivals) before
the next load and then the next round, so that drift of the machine meets all of them alike; idle servers are suspended.
RESULTS gets ``sweep.csv`` (one row per configuration, load and round), ``requests.jsonl`` (every answer with its times)
and ``provenance.json``. Run again after an interruption, it goes on where it stopped. Read the results with
paired_ratio.py and report.py.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import click
from msgspec import Meta
from paired_ratio import frame_baselines, paired_ratios, ratio_table, summarise
from rich.console import Console
from serving.client import Sampling
from serving.configurations import GRAMMAR, parse_configurations
from serving.results import read_sweep
from serving.row import Sla
from serving.schedule import DEFAULT_CONCURRENCY, USERS, loads
from serving.sweep import PROMPTS_PER_USER, Sweep, run_sweep

from sglang_dspark.errors import DSparkError
from sglang_dspark.tools.cli.numbers import Numbers

_RATES = Numbers(Annotated[float, Meta(gt=0, lt=1e6, description="must be above 0")], distinct=True)


@click.command(help="Measure plain serving and DSPARK policies side by side, at several loads, on one set of prompts.")
@click.option("--target", required=True, help="Target checkpoint.")
@click.option("--draft", help="DSPARK draft checkpoint, for configurations that speculate.")
@click.option("--config", "configs", multiple=True, metavar="CONFIG", help=f"{GRAMMAR}. Repeatable.")
@click.option("--dtype", default="bfloat16", show_default=True, help="Of configurations that name none.")
@click.option(
    "--concurrency",
    type=USERS,
    help=f"Closed loop: numbers of users. Default: {DEFAULT_CONCURRENCY}, none with --rate.",
)
@click.option("--rate", "rates", type=_RATES, help="Open loop: requests per second, e.g. 0.5,1,2.")
@click.option(
    "--rate-seconds",
    default=30.0,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    help="Open loop: how long requests arrive in a round, at least.",
)
@click.option("--sla-ttft-ms", type=click.FloatRange(0, min_open=True), help="Goodput: longest time to first token.")
@click.option(
    "--sla-tpot-ms",
    type=click.FloatRange(0, min_open=True),
    help="Goodput: longest mean time per further output token.",
)
@click.option("--rounds", default=4, show_default=True, type=click.IntRange(1), help="Recorded rounds.")
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
@click.option(
    "--spread",
    default=0.0,
    show_default=True,
    type=click.FloatRange(0, 1, max_open=True),
    help="Draw each prompt's longest answer so far above or below --max-tokens, as a share of it: with --ignore-eos, "
    "requests then end apart, as they do in the field.",
)
@click.option("--temperature", default=0.0, show_default=True, type=click.FloatRange(0), help="0 is greedy.")
@click.option("--ignore-eos", is_flag=True, help="Answers of --max-tokens tokens: no tail of a few long ones.")
@click.option("--raw-prompts", is_flag=True, help="Send the text as it is, without the chat template.")
@click.option("--request-timeout", default=600.0, show_default=True, type=click.FloatRange(1), help="Seconds.")
@click.option("--device", default="cpu", show_default=True, type=click.Choice(["cpu", "cuda"]))
@click.option("--server-flags", default="", help="Further arguments of every server, as one text.")
@click.option("--output", required=True, type=click.Path(file_okay=False, path_type=Path), help="Folder for results.")
def main(**options: Any) -> None:
    """Command line; see the module."""
    # Texts and labels may look like markup.
    console = Console(width=None if sys.stdout.isatty() else 160, markup=False, emoji=False)
    # Python ends on SIGTERM without unwinding, which would leave suspended servers behind.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    output = options["output"]
    try:
        run_sweep(_sweep(options), output, console)
        frame = read_sweep(output / "sweep.csv")
        summary = summarise(paired_ratios(frame, "output_tok_s", frame_baselines(frame)))
    except DSparkError as error:
        raise click.ClickException(str(error)) from error
    if not summary.empty:
        console.print(ratio_table(summary, "output_tok_s"))
    console.print(f"Tables and a figure: python benchmarks/report.py {output}", highlight=False)


def _sweep(options: dict[str, Any]) -> Sweep:
    concurrencies = options["concurrency"]
    if not concurrencies and not options["rates"]:
        concurrencies = USERS.convert(DEFAULT_CONCURRENCY, None, None)
    return Sweep(
        target=options["target"],
        draft=options["draft"],
        device=options["device"],
        configurations=parse_configurations(options["configs"], options["dtype"]),
        loads=loads(concurrencies or (), options["rates"] or ()),
        num_rounds=options["rounds"],
        num_prompts=options["num_prompts"],
        rate_seconds=options["rate_seconds"],
        prompts_paths=options["prompts"],
        sampling=Sampling(
            max_tokens=options["max_tokens"],
            temperature=options["temperature"],
            ignore_eos=options["ignore_eos"],
            spread=options["spread"],
            raw=options["raw_prompts"],
            timeout_s=options["request_timeout"],
        ),
        sla=Sla(options["sla_ttft_ms"], options["sla_tpot_ms"]),
        server_flags=tuple(options["server_flags"].split()),
    )


if __name__ == "__main__":
    main()
