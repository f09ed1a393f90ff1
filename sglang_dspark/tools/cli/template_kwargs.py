"""The option ``--chat-template-kwargs`` of every command that asks a target through its chat template."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import click

_Command = TypeVar("_Command", bound=Callable[..., Any])


def json_object(ctx: click.Context, param: click.Parameter, value: Any) -> dict[str, Any]:
    """Callback of an option: a JSON object becomes a dictionary, which itself stays as it is."""
    content = value
    if isinstance(value, str):
        try:
            content = json.loads(value)
        except ValueError:
            content = None
    if not isinstance(content, dict):
        raise click.BadParameter(f"""{value!r} is not a JSON object such as '{{"enable_thinking": false}}'""")
    return content


def chat_template_kwargs_option(command: _Command) -> _Command:
    """Add ``--chat-template-kwargs`` to a command, which gets a dictionary, empty by default."""
    option = click.option(
        "--chat-template-kwargs",
        type=click.UNPROCESSED,
        metavar="JSON",
        default="{}",
        callback=json_object,
        help="""Given to the chat template, e.g. '{"enable_thinking": false}'.""",
    )
    return option(command)


def refuse_without_template(raw: bool, chat_template_kwargs: dict[str, Any]) -> None:
    """Refuse arguments of a chat template that is not used.

    Raises:
        click.UsageError: both are given.
    """
    if raw and chat_template_kwargs:
        raise click.UsageError(
            f"--raw leaves the chat template out, so {json.dumps(chat_template_kwargs)} would go nowhere; "
            "drop --raw, or --chat-template-kwargs and --protocol"
        )
