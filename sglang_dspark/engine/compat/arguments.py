"""``ServerArgs``: fields hold what the operator wrote, and what SGLang decides about them stands beside them."""

import copy
import uuid
from typing import Any

import sglang.srt.environ as environ
import sglang.srt.runtime_context as runtime_context
from sglang.srt.arg_groups.arg_utils import record_fields
from sglang.srt.arg_groups.model_path_hook import handle_model_source_paths
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.arg_groups.serving_hook import handle_missing_default_values
from sglang.srt.server_args import ServerArgs as Record

from sglang_dspark.engine.launch_state import Attached, DSparkServer, OtherServer, TargetOnly
from sglang_dspark.engine.sglang_types import ServerArgs

# SGLang keeps attributes with an underscore beside the fields, also when it sends the object to another process.
_OURS, _START = "_dspark", "_dspark_start"


def attach(args: ServerArgs, ours: Attached) -> None:
    """Put what DSPARK has decided on the arguments; it travels with them to the scheduler."""
    setattr(args, _OURS, ours)
    setattr(args, _START, uuid.uuid4().hex)


def attached(args: ServerArgs) -> Attached | None:
    """Return what :func:`attach` put there; None if DSPARK was not asked for."""
    return getattr(args, _OURS, None)


def name_of_start(args: ServerArgs) -> str:
    """Return a name that no other start of a server has, the same in all processes of this one."""
    return getattr(args, _START)


def speculating(args: ServerArgs) -> DSparkServer | OtherServer | None:
    """Return the server that :func:`attach` put on these arguments; None if it does not decode with DSPARK."""
    server = attached(args)
    return None if isinstance(server, TargetOnly) else server


def tokens_per_step() -> int:
    """Return the most tokens that a step verifies per request, in a process that serves."""
    return int(runtime_context.get_spec().speculative_num_draft_tokens)


def attached_to_ours(args: ServerArgs) -> DSparkServer:
    """Return the server that :func:`attach` put on these arguments, which decodes with our worker."""
    server = attached(args)
    assert isinstance(server, DSparkServer), "these arguments are not of a server with our worker"
    return server


def looked_up(args: ServerArgs) -> ServerArgs:
    """Return a view of a copy of ``args`` for which SGLang has looked up the target's files and the device.

    These are the first things that it does when it resolves ``args``, which stay as they are.
    """
    looked: Any = copy.copy(args)
    vars(looked).update(vars(args))
    looked.speculative_draft_model_path = None  # see defaults.prepare
    looked._resolved_overrides = list(getattr(args, "_resolved_overrides", ()))
    handle_model_source_paths(looked)
    handle_missing_default_values(looked)
    return resolving_view(looked)


Snapshot = tuple[dict[str, object], dict[str, object]]


def snapshot(args: ServerArgs) -> Snapshot:
    """Return the fields of ``args``, and the attributes beside them, before SGLang resolves them."""
    return {field.name: getattr(args, field.name) for field in record_fields(Record)}, dict(vars(args))


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
