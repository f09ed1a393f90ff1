"""``python -m sglang_dspark train``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import click
from click.core import ParameterSource

from sglang_dspark.tools.cli.template_kwargs import chat_template_kwargs_option

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from sglang_dspark.tools.train.pipeline import Evaluation, TrainJob

_Number = TypeVar("_Number", int, float)

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_FOLDER = click.Path(file_okay=False, path_type=Path)
_DRAFTER = click.Path(exists=True, file_okay=False, path_type=Path)
_COUNT = click.IntRange(min=1)
_DEFAULT_INVENTED = 2000
# A server takes new requests as others end; the larger the batch, the shorter the wait for its last answer.
_WRITE_BATCH, _SERVER_WRITE_BATCH = 64, 512
# On a GPU, likewise, a lane takes the next text as one ends.
_LANE_WRITE_BATCH = 2048
# Steps of a run that its time ends.
_MANY_STEPS = 10**9
# Options that become fields of TextPlan, and those that become fields of TrainConfig under another name.
_PLAN_OPTIONS = (
    *("prompts", "invent", "texts", "held_out", "temperatures", "max_tokens", "max_prompt_tokens", "raw"),
    *("chat_template_kwargs", "write_batch", "seed"),
)
_CONFIG_OPTIONS = {
    "block_size": "block_size",
    "intermediate_size": "intermediate_size",
    "rank": "markov_rank",
    "head": "markov_head_type",
    "confidence_head": "confidence_head",
    "own_embeddings": "own_embeddings",
    "steps": "steps",
    "max_minutes": "max_minutes",
    "batch_rows": "batch_rows",
    "anchors": "anchors_per_row",
    "learning_rate": "learning_rate",
    "markov_lr_scale": "markov_lr_scale",
    "loss_vocab": "loss_vocab",
    "checkpoint_every": "checkpoint_every",
    "seed": "seed",
}


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


@click.command(short_help="Make a drafter for a target, on text that the target writes itself.")
@click.option("--target", required=True, help="Folder of the target model, or its name on the Hugging Face hub.")
@click.option("--output", type=_FOLDER, required=True, help="Where everything goes; the drafter is in OUTPUT/draft.")
@click.option("--prompts", type=_FILE, multiple=True, help='JSONL file of {"turns": [text, ...]}; repeatable.')
@click.option(
    "--invent",
    type=click.IntRange(min=0),
    help=f"Prompts that the target invents.  [default: {_DEFAULT_INVENTED}, with --prompts 0]",
)
@click.option("--texts", type=_COUNT, help="Answers to train on.  [default: one per prompt]")
@click.option("--held-out", type=_COUNT, default=32, show_default=True, help="Prompts that are only measured on.")
@click.option(
    "--temperatures", callback=_temperatures, default="0,0.7,1", show_default=True, help="Of the answers, in turn."
)
@click.option("--max-tokens", type=click.IntRange(min=2), default=512, show_default=True, help="Longest answer.")
@click.option("--max-prompt-tokens", type=_COUNT, default=1024, show_default=True, help="Leave longer prompts out.")
@chat_template_kwargs_option
@click.option("--raw", is_flag=True, help="Continue the prompts as they are, without the chat template.")
@click.option("--server", help="URL of an SGLang server of the target that writes the texts.  [default: in process]")
@click.option("--api-key", help="The server's --api-key.")
@click.option("--concurrency", type=_COUNT, default=64, show_default=True, help="Requests to the server at a time.")
@click.option(
    "--write-batch", type=_COUNT, help="Texts written together.  [default: 64, on a GPU 2048, with --server 512]"
)
@click.option("--corpus", type=_FOLDER, help="Folder of the texts; may be another run's.  [default: OUTPUT/corpus]")
@click.option("--store-states", is_flag=True, help="Keep the target's states with the texts. For slow machines.")
@click.option("--block-size", type=_COUNT, default=7, show_default=True, help="Drafts per round.")
@click.option("--layers", type=_COUNT, help="Layers of the drafter.  [default: a seventh of the target's, 1 to 5]")
@click.option("--intermediate-size", type=_COUNT, help="Width of its MLPs.  [default: the target's]")
@click.option(
    "--rank", type=click.IntRange(min=0), default=256, show_default=True, help="Markov rank; 0: no such head."
)
@click.option(
    "--head", type=click.Choice(["vanilla", "gated", "rnn"]), default="vanilla", show_default=True, help="Markov head."
)
@click.option("--confidence-head/--no-confidence-head", default=True, show_default=True)
@click.option("--taps", callback=_layers, help="Target layers it reads, e.g. 1,9,17.  [default: up to 5, evenly]")
@click.option("--mask-token-id", type=click.IntRange(min=0), help="Token that is never written.  [default: found]")
@click.option("--own-embeddings", is_flag=True, help="Copy the target's embedding and head into the checkpoint.")
@click.option("--steps", type=_COUNT, default=3000, show_default=True, help="Training steps.")
@click.option(
    "--max-minutes",
    type=click.FloatRange(min=0, min_open=True),
    help="End the training, and the decay of its learning rate, after this time instead of after --steps.",
)
@click.option("--init", type=_DRAFTER, help="Folder of a drafter to start from; what does not fit is drawn.")
@click.option("--batch-rows", type=_COUNT, default=16, show_default=True, help="Texts per step.")
@click.option("--anchors", type=_COUNT, default=32, show_default=True, help="Blocks per text and step.")
@click.option("--learning-rate", type=click.FloatRange(min=0, min_open=True), default=6e-4, show_default=True)
@click.option(
    "--markov-lr-scale",
    type=click.FloatRange(min=0),
    default=10,
    show_default=True,
    help="On the rate of the Markov head.",
)
@click.option(
    "--loss-vocab", type=click.IntRange(min=0), default=0, help="Only so many frequent tokens in the loss; 0: all."
)
@click.option("--checkpoint-every", type=_COUNT, default=200, show_default=True, help="Steps between checkpoints.")
@click.option("--device", help="[default: cuda where there is one, else cpu]")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), help="[default: bfloat16 on cuda, else float32]")
@click.option("--seed", type=click.IntRange(min=0), default=42, show_default=True)
@click.pass_context
def train(ctx: click.Context, /, **options: Any) -> None:
    """Make a drafter for a target, on text that the target writes itself.

    The target answers prompts from files, and prompts that it invents when its chat template is opened at the user
    turn. Then the drafter is trained and measured on texts it has not seen. Interrupted, the same command goes on where
    it stopped. docs/training.md walks through it.
    """
    import warnings

    from rich.console import Console

    from sglang_dspark.tools.train import pipeline

    # Autocast feeds 16-bit rows to norms with float32 weights; torch says once that it takes the unfused path.
    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
    console = Console(highlight=False)
    job = _job(ctx, options)
    with _RichDisplay(console) as display:
        evaluation = pipeline.train(job, display)
    console.print(_table(evaluation))
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
    from sglang_dspark.tools.train.pipeline import TrainJob
    from sglang_dspark.tools.train.text_folder import TextPlan

    device = options["device"] or ("cuda" if torch.cuda.is_available() else "cpu")
    if device.partition(":")[0] not in ("cpu", "cuda"):
        raise ConfigError(f"--device {device} is none that this package knows; give cpu, cuda or cuda:1")
    if device.startswith("cuda"):
        if not torch.cuda.is_available():
            raise ConfigError(f"--device {device}: torch {torch.__version__} finds no GPU; give --device cpu")
        # The same seed gives the same drafter. Has to be set before the first product on the GPU.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    given = {name for name in options if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    if options["store_states"] and options["server"]:
        raise click.UsageError("--store-states needs the target in this process; drop it, or --server")
    if "invent" not in given:
        options["invent"] = 0 if options["prompts"] else _DEFAULT_INVENTED
    if options["write_batch"] is None:
        lanes = device.startswith("cuda") and not options["store_states"]
        options["write_batch"] = (
            _SERVER_WRITE_BATCH if options["server"] else _LANE_WRITE_BATCH if lanes else _WRITE_BATCH
        )
    if options["max_minutes"] is not None and "steps" not in given:
        options["steps"] = _MANY_STEPS
    plan = {name: options[name] for name in _PLAN_OPTIONS}
    plan["prompts"] = tuple(map(str, options["prompts"]))
    return TrainJob(
        **{name: options[name] for name in ("target", "output", "server", "api_key", "concurrency")},
        **{name: options[name] for name in ("taps", "layers", "mask_token_id", "store_states", "init")},
        corpus=options["corpus"] or options["output"] / "corpus",
        plan=TextPlan(**plan),
        plan_options=frozenset(given & set(_PLAN_OPTIONS) - {"seed"}),
        settings={field: options[name] for name, field in _CONFIG_OPTIONS.items()},
        device=device,
        dtype=getattr(torch, options["dtype"] or ("bfloat16" if device.startswith("cuda") else "float32")),
    )


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


def _table(evaluation: Evaluation) -> Table:
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE, title="share of drafts accepted, with all before them / given all before them")
    for heading in ("draft", "greedy", "", "temperature 1", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    columns = [values for r in (evaluation.greedy, evaluation.sampled) for values in (r.survival, r.conditional)]
    for position, values in enumerate(zip(*columns, strict=True), start=1):
        table.add_row(str(position), *(f"{value:.3f}" for value in values))
    return table
