"""``python -m sglang_dspark calibrate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sglang_dspark.tools.cli.asking import DEFAULT_URL, asking_options, refuse_without_template, trace_client
from sglang_dspark.tools.cli.outputs import OutputFile, new_table, progress_bars

if TYPE_CHECKING:
    from rich.table import Table

    from sglang_dspark.calibration.metrics import Errors
    from sglang_dspark.calibration.survival import Bools, Floats

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
    predicted, and writes a file for --speculative-dspark-confidence-sts-path. Rounds have to verify the whole block:
    the server has to run with --speculative-dspark-schedule static. Errors are measured on prompts that were not
    fitted.
    """
    refuse_without_template(options)

    from rich.console import Console

    from sglang_dspark.calibration.sts import StsCalibration, fit_sts
    from sglang_dspark.errors import ConfigError
    from sglang_dspark.tools.evaluation.measured_set import MeasuredSet
    from sglang_dspark.tools.prompts import read_prompts

    console = Console(highlight=False)
    texts, client = read_prompts(prompts, options["limit"]), trace_client(options)
    (target, drafter), gamma = client.pair(), client.block_size()
    with progress_bars(console, {"prompts": len(texts)}) as (advance,):
        answers = client.ask_all(texts, options["concurrency"], advance)
    rounds = MeasuredSet.from_answers(prompts.name, answers, gamma)
    if rounds.logits is None:
        raise ConfigError(
            f"--url {client.url}: the drafter has no confidence head, so there is nothing to calibrate; serve one that "
            "has (python -m sglang_dspark doctor says what a drafter has)"
        )
    test = rounds.held_out(held_out)
    fit_logits, fit_accepted = rounds.logits[~test], rounds.accepted[~test]
    with console.status("fitting temperatures"):
        temperatures = fit_sts(fit_logits, fit_accepted)
    logits, outcomes = rounds.logits[test], rounds.outcomes[test]
    before, after = (_errors(z, outcomes) for z in (logits, logits / temperatures))
    pairs = [len(outcomes), *outcomes.sum(axis=0)[:-1].tolist()]
    console.print(_table(temperatures, pairs, before, after))
    fitted = f"fitted to {len(fit_logits)} rounds, measured on {len(logits)} rounds of other prompts"
    console.print(
        f"Prefix survival, {fitted}. pairs: rounds that tested the draft; noise: about the ECE of perfect predictions "
        "on as many rounds."
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
    from sglang_dspark.calibration.metrics import errors
    from sglang_dspark.calibration.survival import prefix_survival, sigmoid

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
