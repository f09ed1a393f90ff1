"""Options of every command that has a target answer prompts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from sglang_dspark.tools.evaluation.trace_client import TraceClient

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
        "--max-tokens", type=click.IntRange(min=2), default=128, show_default=True, help="Length limit of an answer."
    ),
    click.option(
        "--temperature",
        type=click.FloatRange(min=0),
        default=0.0,
        show_default=True,
        help="Temperature of the answers; measure at the one that you serve. 0 is greedy.",
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
            f"--raw leaves the chat template out, so {json.dumps(options['chat_template_kwargs'])} would have no "
            "effect; drop one of them"
        )


def trace_client(options: Mapping[str, Any]) -> TraceClient:
    """Return the client that asks the server of ``--url`` as the options say."""
    from sglang_dspark.tools.evaluation.trace_client import TraceClient

    names = ("max_tokens", "temperature", "raw", "chat_template_kwargs", "api_key")
    return TraceClient((options["url"] or DEFAULT_URL).rstrip("/"), **{name: options[name] for name in names})
