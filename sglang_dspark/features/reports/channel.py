"""Questions of an HTTP process to the schedulers, over SGLang's channel for looking at a running server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from operator import itemgetter
from typing import Any

from sglang_dspark.declared import Scalar
from sglang_dspark.engine.carried import id_of_question
from sglang_dspark.engine.sglang_types import TokenizerManager
from sglang_dspark.errors import BusyError, ConfigError

KEY = "dspark"
"""Where our answer lies among the figures that the channel was made for."""
REPLICA = "replica"
"""Where the number of the scheduler's replica lies beside it, from 0."""
ANSWER_LIMIT_S = 10.0
"""Longest time that a caller waits. A scheduler that computes a long prefill answers after it."""
PAUSE_S = 0.02
"""Shortest time between two questions that only read: many readers cost the scheduler no more than one."""
MAX_WAITING = 16
READ_ONLY = ("stats", "capabilities")
Replies = list[dict[str, Any]]
Question = tuple[str, frozenset[tuple[str, Scalar]]]


class Channel:
    """Asks the schedulers one question at a time.

    SGLang's channel gives the next answers that come to the caller whose turn it is. So a question that was sent keeps
    a lock of ours until its answers are there, whether its caller still waits or not.

    Args:
        manager: gives SGLang's ``TokenizerManager``.
        limit_s: longest time that a caller waits.
    """

    def __init__(self, manager: Callable[[], TokenizerManager], limit_s: float = ANSWER_LIMIT_S) -> None:
        self._manager, self._limit_s = manager, limit_s
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[Replies]] = set()
        # Questions that have not been sent yet, so that equal questions get the same answer.
        self._unsent: dict[Question, asyncio.Task[Replies]] = {}
        self._last_sent = float("-inf")

    async def ask(self, question: str, fields: dict[str, Scalar]) -> list[Any]:
        """Return the answers of all schedulers, that of replica 0 first; of the ranks of a replica, rank 0 answers.

        Args:
            question: ``stats``, ``policy`` or ``capabilities``.
            fields: what belongs to it, scalars.

        Raises:
            ConfigError: a scheduler refuses.
            BusyError: it cannot answer, or not in time, or too many questions wait already.
        """
        key = question, frozenset(fields.items())
        task = self._unsent.get(key) if question in READ_ONLY else None
        if task is None:
            if len(self._tasks) >= MAX_WAITING:
                raise BusyError(f"{len(self._tasks)} questions already wait for the scheduler; try again later")
            task = asyncio.create_task(self._ask(key, question, fields))
            self._unsent[key] = task
            self._tasks.add(task)
            task.add_done_callback(self._forget)
        try:
            replies = await asyncio.wait_for(asyncio.shield(task), self._limit_s)
        except TimeoutError:
            raise BusyError(
                f"the scheduler has not answered for {self._limit_s:g} s; it may be in a long step, and a change "
                "of the policy may still take effect: try again later"
            ) from None
        for reply in replies:
            if "refusal" in reply:
                raise ConfigError(reply["refusal"])
            if "failed" in reply:
                raise BusyError(f"the scheduler could not answer {reply['failed']}; its log says why")
        return [reply["answer"] for reply in replies]

    async def _ask(self, key: Question, question: str, fields: dict[str, Scalar]) -> Replies:
        from sglang.srt.managers.io_struct import GetInternalStateReq

        clock = asyncio.get_running_loop().time
        async with self._lock:
            if question in READ_ONLY:
                await asyncio.sleep(self._last_sent + PAUSE_S - clock())
            if self._unsent.get(key) is asyncio.current_task():
                del self._unsent[key]
            self._last_sent = clock()
            manager = self._manager()
            manager.auto_create_handle_loop()
            request = GetInternalStateReq(rid=id_of_question(question, fields))
            states = [output.internal_state for output in await manager.get_internal_state_communicator(request)]
            return [state[KEY] for state in sorted(states, key=itemgetter(REPLICA))]

    def _forget(self, task: asyncio.Task[Replies]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # its caller may be gone, and nothing else looks at it
