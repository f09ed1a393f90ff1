"""``python -m sglang_dspark calibrate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sglang_dspark.tools.cli.asking import DEFAULT_URL, asking_options, refuse_without_template, trace_client
from sglang_dspark.tools.cli.outputs import OutputFile, new_table, progress_bars

if TYPE_CHECKING:
    from rich.table import Table

    from sglang_dspark.calibration.survival import Floats
    from sglang_dspark.tools.calibrate.held_out import PositionErrors

_SHARE = click.FloatRange(0, 1, min_open=True, max_open=True)


@click.command(short_help="Fit the temperatures of a drafter's confidence head to a running server.")
@click.option("--url", default=DEFAULT_URL, show_default=True, help="The running DSPARK server.")
@click.option("--prompts", type=click.Path(path_type=Path), required=True, help="Prompt file.")
@click.option("--limit", type=click.IntRange(min=2), help="Ask only the first so many prompts.")
@asking_options
@click.option("--held-out", type=_SHARE, default=0.3, show_default=True, help="Share of the prompts to test on.")
@click.option("--output", type=OutputFile(), required=True, help="JSON file of the temperatures.")
def calibrate(prompts: Path, held_out: float, output: Path, **options: Any) -> None:
    """Fit the temperatures of a drafter's confidence head to a running server (Sequential Temperature Scaling).

    The command asks the server the prompts, compares how often each draft survived verification with what the head
    predicted, and writes a file for --speculative-dspark-confidence-sts-path. Only rounds that verify the whole block
    count: the server has to run with --speculative-dspark-schedule static. Errors are measured on prompts that were
    not fitted.
    """
    refuse_without_template(options)

    from rich.console import Console

    from sglang_dspark.calibration.online import fit_once
    from sglang_dspark.calibration.sts import StsCalibration, fit_sts
    from sglang_dspark.tools.calibrate.held_out import held_out_errors
    from sglang_dspark.tools.calibrate.traces import BlockRounds
    from sglang_dspark.tools.prompts import read_prompts

    console = Console(highlight=False)
    texts, client = read_prompts(prompts, options["limit"]), trace_client(options)
    (target, drafter), gamma = client.pair(), client.block_size()
    with progress_bars(console, {"prompts": len(texts)}) as (advance,):
        answers = client.ask_all(texts, options["concurrency"], advance)
    rounds = BlockRounds.from_traces([answer.trace for answer in answers], gamma)
    fit, test = rounds.split(len(texts), held_out)
    with console.status("fitting temperatures"):
        temperatures = fit_sts(fit.logits, fit.accepted)
    positions = held_out_errors(test, temperatures, fit_once(fit.logits, fit.accepted))
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
        draft=drafter,
        dataset=prompts.name,
        num_samples=len(fit.logits),
        ece_before=tuple(position.ece_before for position in positions),
        ece_after=tuple(position.ece_after for position in positions),
        ece_shifted=tuple(position.ece_shifted for position in positions),
    ).save(output)
    console.print(f"\n--speculative-dspark-confidence-sts-path {output}", soft_wrap=True)


def _table(temperatures: Floats, positions: list[PositionErrors]) -> Table:
    headings = ("draft", "pairs", "T", "ECE\nbefore", "ECE\nafter", "ECE\nshifted", "ECE\nnoise", "AUC")
    table = new_table(*headings, "Brier\nbefore", "Brier\nafter")
    for draft, (temperature, errors) in enumerate(zip(temperatures, positions, strict=True), start=1):
        eces = (errors.ece_before, errors.ece_after, errors.ece_shifted, errors.ece_noise)
        table.add_row(
            str(draft),
            str(errors.pairs),
            f"{temperature:.3f}",
            *(f"{ece:.2%}" for ece in eces),
            "-" if errors.auc is None else f"{errors.auc:.3f}",
            f"{errors.brier_before:.4f}",
            f"{errors.brier_after:.4f}",
        )
    return table
