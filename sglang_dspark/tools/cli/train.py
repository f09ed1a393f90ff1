"""``python -m sglang_dspark train``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import click
from click.core import ParameterSource

from sglang_dspark.tools.cli.sections import SectionedCommand
from sglang_dspark.tools.cli.settings import setting, taken
from sglang_dspark.tools.cli.template_kwargs import chat_template_kwargs_option
from sglang_dspark.tools.train.config import LossWeights, TextPlan, TrainConfig

if TYPE_CHECKING:
    from rich.console import Console

    from sglang_dspark.tools.train.job import TrainJob

_Number = TypeVar("_Number", int, float)

_FOLDER = click.Path(file_okay=False, path_type=Path)
_COUNT = click.IntRange(min=1)
_DEFAULT_INVENTED = 2000
# A server takes new requests as others end; the larger the batch, the shorter the wait for its last answer.
_SERVER_WRITE_BATCH = 512
# Somebody else's server may have other users.
_CONCURRENCY = 64
# Steps of a run that its time ends.
_MANY_STEPS = 10**9


def _layers(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    return None if value is None else _numbers(value, int)


def _temperatures(ctx: click.Context, param: click.Parameter, value: str) -> tuple[float, ...]:
    numbers = _numbers(value, float)
    if min(numbers) < 0:
        raise click.BadParameter(f"{value!r} has a number below 0, which is greedy")
    return numbers


def _numbers(value: str, kind: type[_Number]) -> tuple[_Number, ...]:
    try:
        return tuple(kind(number) for number in value.split(","))
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is not a list of numbers such as 1,2,3") from error


_SECTIONS = {
    "target": "Target and output",
    "prompts": "Texts",
    "block_size": "Drafter",
    "steps": "Training",
    "optimizer": "Optimizer",
    "ce": "Loss",
    "checkpoint_every": "Machine and files",
}


@click.command(
    cls=SectionedCommand,
    sections=_SECTIONS,
    short_help="Make a drafter for a target, on text that the target writes itself.",
)
@click.option("--target", required=True, help="Folder of the target model, or its name on the Hugging Face hub.")
@click.option("--output", type=_FOLDER, required=True, help="Where everything goes; the drafter is in OUTPUT/draft.")
@click.option(
    "--prompts",
    multiple=True,
    help="JSONL, JSON or parquet file of prompts or conversations, or data set of the hub; repeatable.",
)
@setting("--max-prompts", TextPlan, "max_prompts", "Only so many of them, drawn by the seed.  [default: all]")
@setting("--max-turns", TextPlan, "max_turns", "Turns of a conversation that are answered.  [default: all]")
@click.option(
    "--invent",
    type=click.IntRange(min=0),
    help=f"Prompts that the target invents.  [default: {_DEFAULT_INVENTED}, with --prompts 0]",
)
@setting("--texts", TextPlan, "texts", "Answers to train on.  [default: one per prompt]")
@setting("--held-out", TextPlan, "held_out", "Prompts that are only measured on.")
@setting(
    "--temperatures",
    TextPlan,
    "temperatures",
    "Of the answers, in turn.",
    type=str,
    callback=_temperatures,
    default=",".join(f"{heat:g}" for heat in TextPlan.temperatures),
)
@setting("--max-tokens", TextPlan, "max_tokens", "Longest answer.")
@setting("--max-prompt-tokens", TextPlan, "max_prompt_tokens", "Leave longer prompts out.")
@chat_template_kwargs_option
@click.option("--raw", is_flag=True, help="Continue the prompts as they are, without the chat template.")
@click.option(
    "--server",
    help="URL of an SGLang server of the target that writes the texts.  [default: one of its own, on a CPU none]",
)
@click.option("--api-key", help="The server's --api-key.")
@click.option(
    "--concurrency",
    type=_COUNT,
    help=f"Requests to the server at a time.  [default: {_CONCURRENCY}, with one of its own {_SERVER_WRITE_BATCH}]",
)
@setting(
    "--write-batch",
    TextPlan,
    "write_batch",
    f"Texts written together.  [default: {TextPlan.write_batch}, by a server {_SERVER_WRITE_BATCH}]",
    default=None,
    show_default=False,
)
@click.option("--corpus", type=_FOLDER, help="Folder of the texts; may be another run's.  [default: OUTPUT/corpus]")
@click.option("--store-states", is_flag=True, help="Keep the target's states with the texts. For slow machines.")
@setting("--block-size", TrainConfig, "block_size", "Drafts per round.")
@click.option("--layers", type=_COUNT, help="Layers of the drafter.  [default: a seventh of the target's, 1 to 5]")
@setting("--intermediate-size", TrainConfig, "intermediate_size", "Width of its MLPs.  [default: the target's]")
@setting("--rank", TrainConfig, "markov_rank", "Markov rank; 0: no such head.")
@setting("--head", TrainConfig, "markov_head_type", "Markov head.")
@click.option("--confidence-head/--no-confidence-head", default=TrainConfig.confidence_head, show_default=True)
@click.option("--taps", callback=_layers, help="Target layers it reads, e.g. 1,9,17.  [default: up to 5, evenly]")
@click.option("--mask-token-id", type=click.IntRange(min=0), help="Token that is never written.  [default: found]")
@setting("--draft-vocabulary", TrainConfig, "draft_vocabulary", "Propose only so many frequent tokens; 0: all.")
@click.option("--own-embeddings", is_flag=True, help="Copy the target's embedding and head into the checkpoint.")
@setting("--steps", TrainConfig, "steps", "Training steps.")
@setting(
    "--max-minutes",
    TrainConfig,
    "max_minutes",
    "End the training, and the decay of its learning rate, after this time instead of after --steps.",
)
@setting(
    "--patience", TrainConfig, "patience", "End after so many checkpoints without a better held-out accept length."
)
@click.option(
    "--init", help="Drafter to start from, folder or name on the hub; its shape is taken unless you give one."
)
@setting("--batch-rows", TrainConfig, "batch_rows", "Texts per step, of all processes together.")
@setting(
    "--micro-batch-rows",
    TrainConfig,
    "micro_batch_rows",
    "Texts that go through the drafter together; a step adds up their gradients.  [default: all of a process]",
)
@setting("--anchors", TrainConfig, "anchors_per_row", "Blocks per text and step.")
@setting("--optimizer", TrainConfig, "optimizer", "muon: for the matrices of the layers, adamw for the rest.")
@setting("--learning-rate", TrainConfig, "learning_rate", "At its peak.")
@setting("--markov-lr-scale", TrainConfig, "markov_lr_scale", "On the rate of the Markov head.")
@setting("--schedule", TrainConfig, "schedule", "Course of the learning rate after the warm-up.")
@setting("--warmup-share", TrainConfig, "warmup_share", "Of the run, in which the learning rate rises.")
@setting("--weight-decay", TrainConfig, "weight_decay", "Per unit of learning rate.")
@setting("--grad-clip", TrainConfig, "grad_clip", "Largest norm of a step's gradient.")
@setting("--ce-weight", LossWeights, "ce", "Of cross-entropy in the loss.")
@setting("--tv-weight", LossWeights, "l1", "Of total variation in the loss.")
@setting("--confidence-weight", LossWeights, "confidence", "Of the confidence head in the loss.")
@setting("--position-weights", LossWeights, "positions", "decay: by position; dpace: by what a slot adds as of now.")
@setting("--position-decay", LossWeights, "position_decay", "Slots in which the weight falls to 1/e.")
@setting("--dpace-alpha", LossWeights, "dpace_alpha", "Smoothing of dpace.")
@setting("--loss-vocab", TrainConfig, "loss_vocab", "Only so many frequent tokens in the loss; 0: all.")
@setting("--checkpoint-every", TrainConfig, "checkpoint_every", "Steps between checkpoints.")
@click.option("--device", help="[default: cuda where there is one, else cpu]")
@setting(
    "--dtype",
    TrainConfig,
    "compute_dtype",
    "[default: bfloat16 on cuda, else float32]",
    default=None,
    show_default=False,
)
@setting("--seed", TrainConfig, "seed", "Of everything random.")
@click.option(
    "--deterministic/--no-deterministic",
    default=True,
    show_default=True,
    help="On a GPU: the same seed, the same bits.",
)
@click.option("--dry-run", is_flag=True, help="Say what it would take, load no weights and write nothing.")
@click.pass_context
def train(ctx: click.Context, /, **options: Any) -> None:
    """Make a drafter for a target, on text that the target writes itself.

    The target answers prompts from files, and prompts that it invents when its chat template is opened at the user
    turn. Then the drafter is trained and measured on texts it has not seen. Interrupted, the same command goes on where
    it stopped. Started by torchrun, several processes train together. docs/training.md walks through it.
    """
    import os
    import warnings

    from rich.console import Console
    from transformers.utils import logging

    from sglang_dspark.tools.cli.train_tables import evaluation_table, forecast_table
    from sglang_dspark.tools.train import pipeline
    from sglang_dspark.tools.train.parallel import joined_processes

    # Autocast feeds 16-bit rows to norms with float32 weights; torch says once that it takes the unfused path.
    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
    logging.disable_progress_bar()  # there is one already
    console = Console(highlight=False)
    dry_run = options.pop("dry_run")
    job = _job(ctx, options)
    if dry_run:
        count = int(os.environ.get("WORLD_SIZE", "1"))
        if os.environ.get("RANK", "0") == "0":
            console.print(forecast_table(*pipeline.foretell(job, count), count))
        return
    with joined_processes(job.device) as processes:
        if not processes.is_first:
            pipeline.train(job, _Silence(), processes)
            return
        with _RichDisplay(console) as display:
            evaluation = pipeline.train(job, display, processes)
    console.print(evaluation_table(evaluation))
    console.print(
        f"Accept length on held-out texts: {evaluation.greedy.accept_length:.2f} greedy, "
        f"{evaluation.sampled.accept_length:.2f} at temperature 1 (the correction or bonus token included).\n"
    )
    if Path(job.target).is_dir():
        draft = job.output / "draft"
        console.print(f"python -m sglang_dspark doctor --target {job.target} --draft {draft}", soft_wrap=True)


def _job(ctx: click.Context, options: dict[str, Any]) -> TrainJob:
    import os

    import torch

    from sglang_dspark.errors import ConfigError
    from sglang_dspark.tools.train.job import TrainJob
    from sglang_dspark.tools.train.parallel import local_device

    device = local_device(options["device"] or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.partition(":")[0] not in ("cpu", "cuda"):
        raise ConfigError(f"--device {device} is none that this package knows; give cpu, cuda or cuda:1")
    if device.startswith("cuda"):
        if not torch.cuda.is_available():
            raise ConfigError(f"--device {device}: torch {torch.__version__} finds no GPU; give --device cpu")
        if options["deterministic"]:
            # The same seed gives the same drafter. Has to be set before the first product on the GPU.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True, warn_only=True)
    given = {name for name in options if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    if options["store_states"] and options["server"]:
        raise click.UsageError("--store-states needs the target in this process; drop it, or --server")
    if "invent" not in given:
        options["invent"] = 0 if options["prompts"] else _DEFAULT_INVENTED
    if options["write_batch"] is None:
        by_server = options["server"] or (device.startswith("cuda") and not options["store_states"])
        options["write_batch"] = _SERVER_WRITE_BATCH if by_server else TextPlan.write_batch
    if options["concurrency"] is None:
        options["concurrency"] = _CONCURRENCY if options["server"] else _SERVER_WRITE_BATCH
    if options["max_minutes"] is not None and "steps" not in given:
        options["steps"] = _MANY_STEPS
    options["corpus"] = options["corpus"] or options["output"] / "corpus"
    options["device"] = device
    options["compute_dtype"] = options["compute_dtype"] or ("bfloat16" if device.startswith("cuda") else "float32")
    plan = taken(TextPlan, options)
    return TrainJob(
        **taken(TrainJob, options),
        plan=TextPlan(**plan),
        plan_options=frozenset(given & plan.keys() - {"seed"}),
        settings=taken(TrainConfig, options, but=TrainJob) | {"loss": LossWeights(**taken(LossWeights, options))},
        given=frozenset(given),
    )


class _Silence:
    """The display of all processes but the first."""

    def progress(self, stage: str, done: int, total: int, note: str = "") -> None:
        """See `sglang_dspark.tools.train.pipeline.Display`."""

    def say(self, text: str) -> None:
        """See `sglang_dspark.tools.train.pipeline.Display`."""


class _RichDisplay:
    """One bar per stage; lines that stay above them."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        bar, note = BarColumn(bar_width=16), TextColumn("{task.fields[note]}")
        columns = (TextColumn("{task.description}"), bar, MofNCompleteColumn(), TimeRemainingColumn(), note)
        self._bars = Progress(*columns, console=console)
        self._console = console
        self._stage = ""

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def progress(self, stage: str, done: int, total: int, note: str = "") -> None:
        """See `sglang_dspark.tools.train.pipeline.Display`."""
        if stage != self._stage:
            self._stage = stage
            self._task = self._bars.add_task(stage, total=total, note=note)
        self._bars.update(self._task, completed=done, total=total, note=note)

    def say(self, text: str) -> None:
        """See `sglang_dspark.tools.train.pipeline.Display`."""
        self._console.print(text, soft_wrap=True, markup=False)
