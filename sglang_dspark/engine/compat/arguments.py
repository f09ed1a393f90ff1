"""``ServerArgs``: fields hold what the operator wrote, and what SGLang decides about them stands beside them."""

from __future__ import annotations

from typing import Any

import sglang.srt.environ as environ
import sglang.srt.runtime_context as runtime_context
from sglang.srt.arg_groups.arg_utils import record_fields
from sglang.srt.server_args import ServerArgs

# SGLang keeps attributes with an underscore beside the fields, also when it sends the object to another process.
_OURS = "_dspark"


def attach(args: Any, ours: Any) -> None:
    """Put what DSPARK has decided on the arguments; it travels with them to the scheduler."""
    setattr(args, _OURS, ours)


def attached(args: Any) -> Any:
    """Return what :func:`attach` put there; None if DSPARK was not asked for."""
    return getattr(args, _OURS, None)


def tokens_per_step() -> int:
    """Return the most tokens that a step verifies per request, in a process that serves."""
    return int(runtime_context.get_spec().speculative_num_draft_tokens)


Snapshot = tuple[dict[str, Any], dict[str, Any]]


def snapshot(args: ServerArgs) -> Snapshot:
    """Return the fields of ``args``, and the attributes beside them, before SGLang resolves them."""
    return {field.name: getattr(args, field.name) for field in record_fields(ServerArgs)}, dict(vars(args))


def restore(args: ServerArgs, written: Snapshot) -> None:
    """Make ``args`` what they were, not resolved."""
    values, beside = written
    vars(args).clear()
    vars(args).update(beside)
    for name, value in values.items():
        setattr(args, name, value)


def variables_of_sglang(prefix: str) -> frozenset[str]:
    """Return the environment variables that SGLang itself reads and whose names start with ``prefix``."""
    return frozenset(name for name in dir(environ.envs) if name.startswith(prefix))
