"""The option ``--protocol``: a published way of measuring drafters, set by its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click
from click.core import ParameterSource

PROTOCOLS: Mapping[str, Mapping[str, Any]] = {
    # eval.py and deepspec/eval/base_evaluator.py of DeepSpec
    "deepspec": {
        "temperature": 1.0,
        "max_tokens": 2048,
        "limit": 500,
        "shuffle_seed": 980406,
        "chat_template_kwargs": {"enable_thinking": False},
    }
}
"""Protocol -> the options that it sets."""


def set_options(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Callback of ``--protocol``, which has to be eager: its values become the defaults of the other options."""
    if value is not None:
        ctx.default_map = {**(ctx.default_map or {}), **PROTOCOLS[value]}
    return value


def overridden(ctx: click.Context, protocol: str | None) -> list[str]:
    """Flags of the command line that depart from the protocol."""
    names = PROTOCOLS[protocol] if protocol is not None else ()
    given = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
    return [
        f"--{name.replace('_', '-')}"
        for name in names
        if ctx.get_parameter_source(name) in given and ctx.params[name] != PROTOCOLS[protocol or ""][name]
    ]
