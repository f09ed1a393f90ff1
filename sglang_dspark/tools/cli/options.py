"""Options and outputs that commands share: models, lists of numbers; bars, tables and files."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_origin

import click

from sglang_dspark.declared import validate
from sglang_dspark.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from sglang_dspark.tools.evaluation import TraceClient


DEFAULT_URL = "http://127.0.0.1:30000"

_Command = TypeVar("_Command", bound=Callable[..., Any])


def _json_object(ctx: click.Context, param: click.Parameter, value: str) -> dict[str, Any]:
    try:
        content = json.loads(value)
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise click.BadParameter(f"""{value!r} is not a JSON object such as '{{"enable_thinking": false}}'""")
    return content


chat_template_kwargs_option = click.option(
    "--chat-template-kwargs",
    type=click.UNPROCESSED,
    metavar="JSON",
    default="{}",
    callback=_json_object,
    help="""Arguments of the chat template, e.g. '{"enable_thinking": false}'.""",
)

_OPTIONS = (
    click.option(
        "--max-tokens", type=click.IntRange(min=2), default=128, show_default=True, help="Most tokens of an answer."
    ),
    click.option(
        "--temperature",
        type=click.FloatRange(min=0),
        default=0.0,
        show_default=True,
        help="Temperature of the answers; 0 is greedy. Give the one that your users have.",
    ),
    click.option("--concurrency", type=click.IntRange(min=1), default=8, show_default=True, help="Requests at a time."),
    click.option("--raw", is_flag=True, help="Send the prompts as they are, without the chat template."),
    chat_template_kwargs_option,
    click.option("--api-key", help="The server's --api-key."),
)


def asking_options(command: _Command) -> _Command:
    """Add the options that say how prompts are asked."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def refuse_without_template(options: Mapping[str, Any]) -> None:
    """Refuse arguments of a chat template that is not used."""
    if options["raw"] and options["chat_template_kwargs"]:
        raise click.UsageError(
            f"--chat-template-kwargs {json.dumps(options['chat_template_kwargs'])} has no effect with --raw, which "
            "leaves the chat template out; drop one of them"
        )


def trace_client(options: Mapping[str, Any]) -> TraceClient:
    """Return the client that asks the server of ``--url`` as the options say."""
    from sglang_dspark.tools.evaluation import TIMEOUT_S, TraceClient
    from sglang_dspark.tools.launch import JsonClient

    names, url = ("max_tokens", "temperature", "raw", "chat_template_kwargs"), options["url"] or DEFAULT_URL
    server = JsonClient("--url", url.rstrip("/"), "a DSPARK", TIMEOUT_S, options["api_key"])
    return TraceClient(server, **{name: options[name] for name in names})


class Checkpoint(click.ParamType):  # type: ignore[type-arg]  # generic in some releases of click, not in others
    """A folder, or a name on the Hugging Face hub, whose files are downloaded; the folder in both cases.

    The same values as of ``--model-path`` and ``--speculative-draft-model-path``.
    """

    name = "folder|name"

    def convert(self, value: str | Path, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        if isinstance(value, Path):
            return value
        from sglang_dspark.hub import local_folder

        flag = value if param is None else param.opts[-1]
        return Path(local_folder(value, flag=flag))


class Numbers(click.ParamType):  # type: ignore[type-arg]  # generic in some releases of click, not in others
    """A tuple of numbers such as ``1,2,3``.

    Args:
        kind: annotation that each number is checked by.
        distinct: no number may come twice.
    """

    name = "numbers"

    def __init__(self, kind: Any, *, distinct: bool = False) -> None:
        self._kind, self._distinct = kind, distinct

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        bare = get_args(self._kind)[0] if get_origin(self._kind) is Annotated else self._kind
        try:
            numbers = tuple(bare(word) for word in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers such as 1,2,3", param, ctx)
        if self._distinct and len(set(numbers)) < len(numbers):
            self.fail(f"{value!r} has a number twice; give each once", param, ctx)
        try:
            return tuple(validate(number, self._kind) for number in numbers)
        except ValueError as error:
            self.fail(f"each number of {value!r} {error}", param, ctx)


class OutputFile(click.Path):
    """A file that the command writes at its end. What would fail then is refused before a server has worked."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the path, whose folder exists."""
        path = Path(str(super().convert(value, param, ctx)))
        flag = param.opts[0] if param is not None else "file"
        if not path.parent.is_dir():
            raise ConfigError(f"{flag} {path}: there is no folder {path.parent}; create it first")
        return path


@contextmanager
def progress_bars(console: Console, totals: dict[str, int]) -> Iterator[list[Callable[..., None]]]:
    """Show a bar with an estimate of the time left for each of ``{what: how many}``, until the block ends.

    What it yields is called with what was done since the last call, 1 by default.
    """
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield [partial(progress.advance, progress.add_task(what, total=total)) for what, total in totals.items()]


def new_table(*headings: str, title: str | None = None, left: Collection[str] = ()) -> Table:
    """Return an empty table: columns with headings in ``left`` are flush left and never cut, others flush right."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    # A title is wrapped at the width of its table.
    table = Table(
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        title=title,
        title_justify="left",
        min_width=len(title or ""),
    )
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right", no_wrap=heading in left)
    return table


def write_csv(path: Path, rows: Sequence[Mapping[str, str | float]]) -> None:
    """Write rows that all have the same columns, one at least; numbers with six digits."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({name: x if isinstance(x, str) else f"{x:.6g}" for name, x in row.items()})
