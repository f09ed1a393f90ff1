"""Questions of the HTTP process to the scheduler process, over SGLang's channel for looking at a running server."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from sglang_dspark.errors import ConfigError
from sglang_dspark.stats.history import HISTORY_S

KEY = "dspark"
"""Where our answer lies among the figures that the channel was made for."""


async def ask(manager: Any, question: str, fields: dict[str, Any]) -> Any:
    """The scheduler's answer, of rank 0 where there are several.

    The question travels as the id of SGLang's request for the scheduler's state, which carries nothing else and which
    no client can write.

    Args:
        manager: SGLang's ``TokenizerManager``.
        question: ``stats``, ``policy`` or ``capabilities``.
        fields: what belongs to it.

    Raises:
        ConfigError: the scheduler refuses.
    """
    from sglang.srt.managers.io_struct import GetInternalStateReq

    manager.auto_create_handle_loop()
    request = GetInternalStateReq(rid=json.dumps({KEY: {"question": question, "fields": fields}}))
    reply = (await manager.get_internal_state_communicator(request))[0].internal_state[KEY]
    if "refusal" in reply:
        raise ConfigError(reply["refusal"])
    return reply["answer"]


def answer(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    """Hook around the scheduler's end of the channel; what is not ours goes on to SGLang."""
    from sglang.srt.managers.io_struct import GetInternalStateReqOutput

    if recv_req.rid is None:
        return original(scheduler, recv_req)
    asked = json.loads(recv_req.rid)[KEY]
    try:
        reply = {"answer": _found(scheduler.draft_worker, asked["question"], asked["fields"])}
    except ConfigError as error:
        reply = {"refusal": str(error)}
    return GetInternalStateReqOutput(internal_state={KEY: reply})


def _found(worker: Any, question: str, fields: dict[str, Any]) -> Any:
    match question:
        case "stats":
            return worker.report(min(max(fields["history_s"], 0), HISTORY_S))
        case "policy":
            return worker.switch_policy(fields)
        case "capabilities":
            return worker.capabilities()
    raise ConfigError(f"{question}: no question that the scheduler answers")
