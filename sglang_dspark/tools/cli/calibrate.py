"""``python -m sglang_dspark calibrate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sglang_dspark.tools.cli.outputs import check_outputs
from sglang_dspark.tools.cli.progress import progress_bar
from sglang_dspark.tools.cli.template_kwargs import chat_template_kwargs_option, refuse_without_template

if TYPE_CHECKING:
    from rich.table import Table

    from sglang_dspark.calibration.survival import Floats
    from sglang_dspark.tools.calibrate.held_out import PositionErrors

_FILE = click.Path(dir_okay=False, path_type=Path)
_SHARE = click.FloatRange(0, 1, min_open=True, max_open=True)
_DPI = 150


@click.command(short_help="Fit the temperatures of a drafter's confidence head to a running server.")
@click.option("--url", default="http://127.0.0.1:30000", show_default=True, help="The running DSPARK server.")
@click.option("--prompts", "prompt_file", type=_FILE, required=True, help='JSONL file of {"turns": [text, ...]}.')
@click.option("--limit", type=click.IntRange(min=2), help="Ask only the first so many prompts.")
@click.option(
    "--max-tokens", type=click.IntRange(min=2), default=128, show_default=True, help="Length limit of an answer."
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="Of the answers; calibrate at the one you serve.",
)
@click.option("--held-out", type=_SHARE, default=0.3, show_default=True, help="Share of the prompts to test on.")
@click.option("--concurrency", type=click.IntRange(min=1), default=8, show_default=True, help="Requests at a time.")
@click.option("--raw", is_flag=True, help="Send the prompts as they are, without the chat template.")
@chat_template_kwargs_option
@click.option("--api-key", help="The server's --api-key.")
@click.option("--output", type=_FILE, required=True, help="Where the temperatures go (JSON).")
@click.option("--plot", type=_FILE, help="Where a reliability diagram goes (PNG).")
def calibrate(
    url: str,
    prompt_file: Path,
    limit: int | None,
    max_tokens: int,
    temperature: float,
    held_out: float,
    concurrency: int,
    raw: bool,
    chat_template_kwargs: dict[str, Any],
    api_key: str | None,
    output: Path,
    plot: Path | None,
) -> None:
    """Fit the temperatures of a drafter's confidence head to a running server (Sequential Temperature Scaling).

    Asks the server the prompts, compares how often each draft survived verification with what the head predicted, and
    writes a file for --speculative-dspark-confidence-sts-path. Only rounds that verify the whole block count: the
    server has to run with --speculative-dspark-schedule static. Errors are measured on prompts that were not fitted.
    """
    refuse_without_template(raw, chat_template_kwargs)

    from rich.console import Console

    from sglang_dspark.calibration.online import fit_once
    from sglang_dspark.calibration.sts import StsCalibration, fit_sts
    from sglang_dspark.tools.calibrate.held_out import HeldOut
    from sglang_dspark.tools.calibrate.trace_client import TraceClient
    from sglang_dspark.tools.calibrate.traces import BlockRounds
    from sglang_dspark.tools.prompts import read_prompts

    console = Console(highlight=False)
    prompts = read_prompts(prompt_file, limit)
    check_outputs(output, plot)
    client = TraceClient(url.rstrip("/"), max_tokens, temperature, raw, chat_template_kwargs, api_key)
    (target, draft), gamma = client.pair(), client.block_size()
    with progress_bar(console, "prompts", len(prompts)) as advance:
        answers = client.ask_all(prompts, concurrency, advance)
    rounds = BlockRounds.from_traces([answer.trace for answer in answers], gamma)
    fit, test = rounds.split(len(prompts), held_out)
    with console.status("fitting temperatures"):
        temperatures = fit_sts(fit.logits, fit.accepted)
    measured = HeldOut.measure(test, temperatures, fit_once(fit.logits, fit.accepted))
    positions = measured.positions()
    console.print(_table(temperatures, positions))
    fitted = f"fitted to {len(fit.logits)} rounds, measured on {len(test.logits)} rounds of other prompts"
    console.print(
        f"Prefix survival, {fitted}. pairs: rounds that tested the draft; shifted: with a scale and a shift per "
        "position, as a server calibrates itself while it runs; noise: about the ECE of perfect predictions on as many "
        "rounds."
    )
    StsCalibration(
        tuple(temperatures.tolist()),
        target=target,
        draft=draft,
        dataset=prompt_file.name,
        num_samples=len(fit.logits),
        ece_before=tuple(position.ece_before for position in positions),
        ece_after=tuple(position.ece_after for position in positions),
        ece_shifted=tuple(position.ece_shifted for position in positions),
    ).save(output)
    console.print(f"\n--speculative-dspark-confidence-sts-path {output}", soft_wrap=True)
    if plot is not None:
        from sglang_dspark.tools.calibrate.reliability_plot import reliability_figure

        reliability_figure(measured, f"{draft} on {prompt_file.name}, {fitted}").savefig(plot, dpi=_DPI)
        console.print(plot, soft_wrap=True)


def _table(temperatures: Floats, positions: list[PositionErrors]) -> Table:
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))  # fits 80 columns
    headings = ("draft", "pairs", "T", "ECE\nbefore", "ECE\nafter", "ECE\nshifted", "ECE\nnoise", "AUC")
    for heading in (*headings, "Brier\nbefore", "Brier\nafter"):
        table.add_column(heading, justify="right", no_wrap=True)
    for draft, (temperature, errors) in enumerate(zip(temperatures, positions, strict=True), start=1):
        table.add_row(
            str(draft),
            str(errors.pairs),
            f"{temperature:.3f}",
            f"{errors.ece_before:.2%}",
            f"{errors.ece_after:.2%}",
            f"{errors.ece_shifted:.2%}",
            f"{errors.ece_noise:.2%}",
            "-" if errors.auc is None else f"{errors.auc:.3f}",
            f"{errors.brier_before:.4f}",
            f"{errors.brier_after:.4f}",
        )
    return table
