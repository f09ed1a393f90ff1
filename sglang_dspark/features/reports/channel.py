"""Questions of an HTTP process to the schedulers, over SGLang's channel for looking at a running server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any

from sglang_dspark.declared import Scalar
from sglang_dspark.engine.carried import id_of_question
from sglang_dspark.engine.http import Turns
from sglang_dspark.engine.sglang_types import TokenizerManager
from sglang_dspark.errors import BusyError, ConfigError

KEY = "dspark"
"""Where our answer lies among the figures that the channel was made for."""
REPLICA = "replica"
"""Where the number of the scheduler's replica lies beside it, from 0."""
READ_ONLY = ("stats", "capabilities")
Replies = list[dict[str, Any]]
Question = tuple[str, frozenset[tuple[str, Scalar]]]


class Channel:
    """Asks the schedulers one question at a time.

    SGLang's channel gives the next answers that come to the caller whose turn it is. So a question that was sent keeps
    its turn until its answers are there, whether its caller still waits or not.

    Args:
        manager: gives SGLang's ``TokenizerManager``.
        turns: of all calls to the schedulers.
    """

    def __init__(self, manager: Callable[[], TokenizerManager], turns: Turns) -> None:
        self._manager, self._turns = manager, turns
        # Questions that have not been sent yet, so that equal questions get the same answer.
        self._unsent: dict[Question, asyncio.Task[Replies]] = {}

    async def ask(self, question: str, fields: dict[str, Scalar]) -> list[Any]:
        """Return the answers of all schedulers, that of replica 0 first; of the ranks of a replica, rank 0 answers.

        Args:
            question: ``stats``, ``policy`` or ``capabilities``.
            fields: what belongs to it, scalars.

        Raises:
            ConfigError: a scheduler refuses.
            BusyError: it cannot answer, or not in time, or too many calls wait already.
        """
        key = question, frozenset(fields.items())
        task = self._unsent.get(key) if question in READ_ONLY else None
        if task is None:
            task = self._unsent[key] = self._turns.begin(partial(self._ask, key, question, fields))
        replies = await self._turns.result(task)
        for reply in replies:
            if "refusal" in reply:
                raise ConfigError(reply["refusal"])
            if "failed" in reply:
                raise BusyError(f"the scheduler could not answer {reply['failed']}; its log says why")
        return [reply["answer"] for reply in replies]

    async def _ask(self, key: Question, question: str, fields: dict[str, Scalar]) -> Replies:
        from sglang.srt.managers.io_struct import GetInternalStateReq

        if self._unsent.get(key) is asyncio.current_task():
            del self._unsent[key]
        manager = self._manager()
        manager.auto_create_handle_loop()
        request = GetInternalStateReq(rid=id_of_question(question, fields))
        states = [output.internal_state for output in await manager.get_internal_state_communicator(request)]
        return [state[KEY] for state in sorted(states, key=itemgetter(REPLICA))]
