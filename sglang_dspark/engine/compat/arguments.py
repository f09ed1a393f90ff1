"""``ServerArgs``, however it is resolved.

First an object resolved itself when it was made, and its fields were overwritten. Now it holds what the operator wrote,
and ``resolve_once`` decides the rest; decided values stand beside it and are read through a view.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import sglang.srt.arg_groups.overrides as overrides
import sglang.srt.environ as environ
import sglang.srt.runtime_context as runtime_context
import sglang.srt.server_args as server_args
from sglang.srt.server_args import ServerArgs

CLASS = "sglang.srt.server_args.ServerArgs"

RESOLVED_LATER = hasattr(ServerArgs, "resolve_once")
"""Whether making the object leaves it as the operator wrote it."""

# SGLang keeps attributes with an underscore beside the fields, also when it sends the object to another process.
_OURS = "_dspark"


def resolved(args: Any) -> Any:
    """``args`` as the server runs with them, and with what :func:`attach` put there."""
    return overrides.resolving_view(args) if RESOLVED_LATER else args


def record_of(args: Any) -> Any:
    """The object itself, behind the stand-in that algorithms are handed where resolving writes no fields."""
    return getattr(args, "_server_args", args) if RESOLVED_LATER else args


def attach(args: Any, ours: Any) -> None:
    """Put what DSPARK has settled on the arguments; it travels with them to the scheduler."""
    setattr(record_of(args), _OURS, ours)


def attached(args: Any) -> Any:
    """What :func:`attach` put there; None where DSPARK does not serve."""
    return getattr(args, _OURS, None)


def model_config(args: Any) -> Any:
    """SGLang's config of the target."""
    return overrides.model_config_of(record_of(args)) if RESOLVED_LATER else args.get_model_config()


def tokens_per_step() -> int:
    """Tokens that a step verifies per request at most, in a process that serves."""
    return int(_in_force("spec").speculative_num_draft_tokens)


def stream_interval() -> int:
    """Tokens between two messages of a stream whose request does not name a number, in a process that serves."""
    return int(_in_force("serving").stream_interval)


def _in_force(group: str) -> Any:
    """What holds the arguments of a group in a process that serves."""
    return getattr(runtime_context, f"get_{group}")() if RESOLVED_LATER else server_args.get_global_server_args()


def fields() -> Iterator[Any]:
    """Fields of ``ServerArgs``, with ``name`` and ``default``."""
    if dataclasses.is_dataclass(ServerArgs):
        yield from dataclasses.fields(ServerArgs)
    else:
        from sglang.srt.arg_groups.arg_utils import record_fields

        yield from record_fields(ServerArgs)


def has_field(name: str) -> bool:
    """Whether this SGLang has such an argument of its own."""
    return any(field.name == name for field in fields())


def undo_of(args: Any) -> Callable[[], None]:
    """A function that makes ``args``, arguments or a parsed command line, what they are now, resolved or not."""
    names = [field.name for field in fields()] if isinstance(args, ServerArgs) else []
    values = {name: getattr(args, name) for name in names}
    beside = dict(vars(args))

    def undo() -> None:
        vars(args).clear()
        vars(args).update(beside)
        for name, value in values.items():
            setattr(args, name, value)

    return undo


def variables_of_sglang(prefix: str) -> frozenset[str]:
    """Environment variables that SGLang itself reads and whose names start with ``prefix``."""
    return frozenset(name for name in dir(environ.envs) if name.startswith(prefix))


def is_switched_on(variable: str) -> bool:
    """Whether an environment variable that this SGLang may know is set to true."""
    known = getattr(environ.envs, variable, None)
    return known is not None and bool(known.get())


def grpc_port(args: Any) -> int | None:
    """Port of a gRPC server beside the one for HTTP; before it came, only its number was made up."""
    return args.grpc_port if has_field("smg_grpc_mode") else None
