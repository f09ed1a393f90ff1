"""Questions of the HTTP process to the scheduler process, over SGLang's channel for changing a running server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dspark.errors import ConfigError
from sglang_dspark.stats.history import HISTORY_S

KEY = "dspark"
"""Where a question and its answer lie among the server arguments that the channel was made for."""


async def ask(manager: Any, question: str, fields: dict[str, Any]) -> Any:
    """The scheduler's answer, of rank 0 where there are several.

    Args:
        manager: SGLang's ``TokenizerManager``.
        question: ``stats``, ``policy`` or ``capabilities``.
        fields: what belongs to it.

    Raises:
        ConfigError: the scheduler refuses.
    """
    from sglang.srt.managers.io_struct import SetInternalStateReq

    manager.auto_create_handle_loop()
    request = SetInternalStateReq(server_args={KEY: {"question": question, "fields": fields}})
    reply = (await manager.set_internal_state_communicator(request))[0]
    if not reply.updated:
        raise ConfigError(reply.server_args[KEY])
    return reply.server_args[KEY]


def answer(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    """Hook around the scheduler's end of the channel; what is not ours goes on to SGLang."""
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    asked = recv_req.server_args.get(KEY)
    if asked is None:
        return original(scheduler, recv_req)
    try:
        found = _found(scheduler.draft_worker, asked)
    except ConfigError as error:
        return SetInternalStateReqOutput(updated=False, server_args={KEY: str(error)})
    return SetInternalStateReqOutput(updated=True, server_args={KEY: found})


def _found(worker: Any, asked: Any) -> Any:
    # SGLang's own route to this channel passes on whatever a client wrote.
    match asked:
        case {"question": "stats", "fields": {"history_s": int(seconds)}}:
            return worker.report(min(max(seconds, 0), HISTORY_S))
        case {"question": "policy", "fields": dict(fields)}:
            return worker.switch_policy(fields)
        case {"question": "capabilities"}:
            return worker.capabilities()
    raise ConfigError(f"{KEY}: no question that the scheduler answers; use the routes below /dspark")
