"""``python -m sglang_dspark train``."""

from __future__ import annotations

from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from dspark_training.options import SectionedCommand, settings_options, taken
from dspark_training.settings import LossWeights, TextPlan, TrainConfig
from sglang_dspark.errors import ConfigError
from sglang_dspark.tools.cli.options import Numbers, chat_template_kwargs_option

if TYPE_CHECKING:
    from accelerate import Accelerator
    from rich.table import Table

    from dspark_training.pipeline import Evaluation, TrainJob

_FOLDER = click.Path(file_okay=False, path_type=Path)
_COUNT = click.IntRange(min=1)
_DEFAULT_INVENTED = 2000
_CONCURRENCY = 64
# The other processes wait while the first one lets the target write its texts.
_PATIENCE = timedelta(days=30)


@click.command(cls=SectionedCommand, short_help="Train a drafter for a target, on text that the target writes itself.")
@click.option("--target", required=True, help="Folder of the target model, or its name on the Hugging Face hub.")
@click.option("--output", type=_FOLDER, required=True, help="Folder of all results; the drafter is in OUTPUT/draft.")
@click.option("--init", help="Drafter to start from, folder or name on the hub; it also gives the shape.")
@click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), help="Where to train.  [default: cuda if there is a GPU, else cpu]"
)
@click.option("--log-with", help="Tracker of accelerate, e.g. tensorboard or wandb; has to be installed.")
@click.option(
    "--prompts",
    multiple=True,
    help="File of prompts or conversations, folder of such files, or data set of the hub; repeatable.",
)
@click.option(
    "--invent",
    type=click.IntRange(min=0),
    help=f"Prompts that the target invents.  [default: {_DEFAULT_INVENTED}; 0 with --prompts]",
)
@chat_template_kwargs_option
@click.option("--corpus", type=_FOLDER, help="Folder of the texts; may be another run's.  [default: OUTPUT/corpus]")
@click.option(
    "--server",
    help="URL of an SGLang server of the target that writes the texts.  [default: the command starts one on a GPU]",
)
@click.option("--api-key", help="The server's --api-key.")
@click.option(
    "--concurrency", type=_COUNT, default=_CONCURRENCY, show_default=True, help="Requests to the server at a time."
)
@click.option("--store-states", is_flag=True, help="Run the target over the texts once and keep its states in memory.")
@click.option("--layers", type=_COUNT, help="Layers of the drafter.  [default: a seventh of the target's, 1 to 5]")
@click.option("--taps", type=Numbers(int), help="Target layers that it reads, e.g. 1,9,17.  [default: up to 5, evenly]")
@click.option(
    "--mask-token-id", type=click.IntRange(min=0), help="Token in slots to be filled.  [default: an unused one]"
)
@settings_options(TextPlan, "Texts")
@settings_options(TrainConfig, "Drafter and training")
@settings_options(LossWeights, "Loss")
@click.pass_context
def train(ctx: click.Context, /, **options: Any) -> None:
    """Train a drafter for a target, on text that the target writes itself.

    The target answers prompts from files, and prompts that it invents when its chat template is opened at the user
    turn. Then the drafter is trained on these texts, and measured on some that are held out. After an interruption,
    the same command goes on where it stopped. Started with accelerate launch or torchrun, several processes train
    together.
    """
    missing = [name for name in ("accelerate", "datasets") if find_spec(name) is None]
    if missing:
        raise ConfigError(f'train needs {" and ".join(missing)}: pip install "sglang-dspark[train]"')
    from rich.console import Console
    from transformers.utils import logging

    from dspark_training import pipeline

    logging.disable_progress_bar()  # there is one already
    device, log_with = options.pop("device"), options.pop("log_with")
    accelerator = _accelerator(device, log_with, options)
    job = _job(ctx, options)
    console = Console(highlight=False, quiet=not accelerator.is_main_process)
    if log_with is not None:
        accelerator.init_trackers("tracker")
    with pipeline.Display(console) as display:
        evaluation = pipeline.train(job, display, accelerator)
    accelerator.end_training()
    console.print(_evaluation_table(evaluation))
    console.print(
        f"Accept length on held-out texts: {evaluation.greedy.accept_length:.2f} greedy, "
        f"{evaluation.sampled.accept_length:.2f} at temperature 1 (the correction or bonus token included).\n"
    )
    if Path(job.target).is_dir():
        draft = job.output / "draft"
        console.print("Check whether it can be served here:")
        console.print(f"sglang-dspark doctor --target {job.target} --draft {draft}", soft_wrap=True)


def _accelerator(device: str | None, log_with: str | None, options: dict[str, Any]) -> Accelerator:
    """Make accelerate's context, and settle the dtype from the device that it has found."""
    import torch
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs, set_seed

    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device cuda: torch {torch.__version__} finds no GPU; give --device cpu")
    cpu = device == "cpu" or not torch.cuda.is_available()
    options["compute_dtype"] = options["compute_dtype"] or ("float32" if cpu else "bfloat16")
    set_seed(options["seed"])
    return Accelerator(
        cpu=cpu,
        mixed_precision="bf16" if options["compute_dtype"] == "bfloat16" else "no",
        gradient_accumulation_steps=options["gradient_accumulation"],
        log_with=log_with,
        project_dir=str(options["output"]),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=_PATIENCE)],
    )


def _job(ctx: click.Context, options: dict[str, Any]) -> TrainJob:
    from dspark_training.pipeline import TrainJob

    given = {name for name in options if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    if "invent" not in given:
        options["invent"] = 0 if options["prompts"] else _DEFAULT_INVENTED
    options["corpus"] = options["corpus"] or options["output"] / "corpus"
    plan = taken(TextPlan, options)
    return TrainJob(
        **taken(TrainJob, options),
        plan=TextPlan(**plan),
        plan_given=frozenset(given & plan.keys() - {"seed"}),
        settings=taken(TrainConfig, options, but=TrainJob) | {"loss": LossWeights(**taken(LossWeights, options))},
        given=frozenset(given),
    )


def _evaluation_table(evaluation: Evaluation) -> Table:
    """Show acceptance at each position of a block."""
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE, title="share of drafts accepted, with all before them / given all before them")
    for heading in ("draft", "greedy", "", "temperature 1", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    columns = [values for r in (evaluation.greedy, evaluation.sampled) for values in (r.survival, r.conditional)]
    for position, values in enumerate(zip(*columns, strict=True), start=1):
        table.add_row(str(position), *(f"{value:.3f}" for value in values))
    return table
