"""``ServerArgs``: fields hold what the operator wrote, and what SGLang decides about them stands beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sglang.srt.environ as environ
import sglang.srt.runtime_context as runtime_context
from sglang.srt.arg_groups.arg_utils import record_fields
from sglang.srt.server_args import ServerArgs

# SGLang keeps attributes with an underscore beside the fields, also when it sends the object to another process.
_OURS = "_dspark"


def attach(args: Any, ours: Any) -> None:
    """Put what DSPARK has settled on the arguments; it travels with them to the scheduler."""
    # Algorithms are handed a stand-in, behind which the object is.
    setattr(getattr(args, "_server_args", args), _OURS, ours)


def attached(args: Any) -> Any:
    """Return what :func:`attach` put there; None where DSPARK does not serve."""
    return getattr(args, _OURS, None)


def tokens_per_step() -> int:
    """Tokens that a step verifies per request at most, in a process that serves."""
    return int(runtime_context.get_spec().speculative_num_draft_tokens)


def undo_of(args: ServerArgs) -> Callable[[], None]:
    """A function that makes ``args`` what they are now, not resolved."""
    values = {field.name: getattr(args, field.name) for field in record_fields(ServerArgs)}
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
