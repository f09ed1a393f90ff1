"""What ``train`` prints before and after its work."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from sglang_dspark.tools.train.config import TrainConfig
    from sglang_dspark.tools.train.dry_run import Forecast
    from sglang_dspark.tools.train.pipeline import Evaluation


def forecast_table(forecast: Forecast, config: TrainConfig, processes: int) -> Table:
    """What a run would take."""
    from rich.box import SIMPLE
    from rich.table import Table

    from sglang_dspark.tools.train.dry_run import SHARE_OF_RATE, matrix_rate

    table = Table(
        box=SIMPLE, title="what this run would take, were all prompts and answers the longest", title_justify="left"
    )
    table.add_column("")
    table.add_column("", justify="right", no_wrap=True)
    training = forecast.training
    shape = f"{config.num_layers} layers, block size {config.block_size}, rank {config.markov_rank}"
    table.add_row("parameters: target", f"{forecast.target_parameters / 1e6:,.1f} M")
    table.add_row(f"parameters: trained ({shape})", f"{forecast.trained_parameters / 1e6:,.1f} M")
    per = f"memory of each of {processes} processes" if processes > 1 else "memory"
    table.add_row(f"{per}: target", _bytes(forecast.target_bytes))
    table.add_row(f"{per}: weights, gradients, optimizer", _bytes(training.parameters))
    table.add_row(f"{per}: kept of a step for its backward pass", _bytes(training.activations))
    table.add_row(f"{per}: held for a moment", _bytes(training.transient))
    table.add_row(f"{per}: all of it", _bytes(forecast.target_bytes + training.total), end_section=True)
    table.add_row("answers to train on", f"{forecast.texts:,}")
    table.add_row("tokens that the target writes", f"{forecast.written_tokens:,}")
    table.add_row("tokens to train on, prompts included", f"{forecast.text_tokens:,}")
    table.add_row("their states, where they are kept", _bytes(forecast.states_bytes))
    table.add_row("checkpoint of the drafter", _bytes(forecast.draft_bytes), end_section=True)
    table.add_row("blocks per step", f"{forecast.blocks_per_step:,}")
    if forecast.steps is None or forecast.epochs is None:
        table.add_row("time of training, by the clock", _time(60 * (config.max_minutes or 0)))
        return table
    table.add_row("steps", f"{forecast.steps:,}")
    table.add_row("times that each text is read", f"{forecast.epochs:.1f}")
    rate = matrix_rate(config.device, config.compute_torch_dtype)
    seconds = forecast.steps * forecast.step_operations / (SHARE_OF_RATE * rate * processes)
    said = f"at {SHARE_OF_RATE:.0%} of the {rate / 1e12:.3g} TFLOP/s of matrix products on {config.device} now"
    table.add_row(f"time of training, {said}", _time(seconds))
    return table


def _bytes(number: int) -> str:
    return f"{number / 1e9:,.2f} GB"


def _time(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{seconds / 60:.1f} min"


def evaluation_table(evaluation: Evaluation) -> Table:
    """Acceptance at each position of a block."""
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE, title="share of drafts accepted, with all before them / given all before them")
    for heading in ("draft", "greedy", "", "temperature 1", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    columns = [values for r in (evaluation.greedy, evaluation.sampled) for values in (r.survival, r.conditional)]
    for position, values in enumerate(zip(*columns, strict=True), start=1):
        table.add_row(str(position), *(f"{value:.3f}" for value in values))
    return table
