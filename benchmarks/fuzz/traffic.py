"""Users that send bodies to one server, next to a request that streams all the time and tells what holds others up."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from fuzz.bodies import GENERATE, SESSIONS, Body

HUNG_S = 120.0
PROBE = {
    "input_ids": [5, 6, 7, 8],
    "sampling_params": {"temperature": 0, "max_new_tokens": 300, "ignore_eos": True},
    "stream": True,
}
_KEPT_GAPS = 12
_LAST_BREATH_S = 10.0
_TURNS_S = 0.3

HUNG, BROKEN, ENDED, LEFT = "hung", "broken", "ended", "left"
"""What a body gets in place of a status: nothing for too long; the end of its connection, or of the server; or that
nobody reads the answer."""


@dataclass(frozen=True)
class Answer:
    """The outcome of a body.

    Attributes:
        status: of HTTP, or of the error inside a stream; or one of the words above.
        content: JSON of a whole answer, None of others.
    """

    status: int | str
    content: Any = None

    def said(self) -> list[Any]:
        """Return texts and ends of a whole answer, by sample."""
        answers = self.content if isinstance(self.content, list) else [self.content or {}]
        samples = [sample for answer in answers for sample in answer.get("choices", [answer])]
        return [_said(sample) for sample in samples]


def _said(sample: dict[str, Any]) -> list[Any]:
    message = dict(sample.get("message") or {})
    calls = [call["function"] for call in message.pop("tool_calls", None) or ()]
    reason = sample.get("finish_reason") or sample.get("meta_info", {}).get("finish_reason")
    return [sample.get("output_ids"), sample.get("text"), message, calls, reason]


def open_session() -> aiohttp.ClientSession:
    """Return a session with a connection for each request: one that waits may be closed just as it is used."""
    connector = aiohttp.TCPConnector(force_close=True)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))


async def send(session: aiohttp.ClientSession, url: str, body: Body, patience_s: float = HUNG_S) -> Answer:
    """Send a body, and read its answer as its mode says."""
    data, headers = json.dumps(body.fields), {"Content-Type": "application/json"}
    if body.mode == "abandoned":
        patience_s = random.Random(data).choice((0.005, 0.05, 0.3))
    try:
        async with asyncio.timeout(patience_s), session.post(url + body.path, data=data, headers=headers) as response:
            if body.mode == "dropped":
                await response.content.readany()
                return Answer(LEFT if response.ok else response.status)
            content = await response.read()
            streamed = response.content_type == "text/event-stream"
            inside = next(_errors(content), response.status) if streamed else response.status
            return Answer(inside, None if streamed or not response.ok else json.loads(content))
    except TimeoutError:
        return Answer(LEFT if body.mode == "abandoned" else HUNG)
    except (aiohttp.ClientError, ConnectionError):
        return Answer(BROKEN if await _stands(session, url) else ENDED)


async def _stands(session: aiohttp.ClientSession, url: str) -> bool:
    """Return whether a server still answers; those that end take some seconds for it."""
    await asyncio.sleep(_LAST_BREATH_S)
    short = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 2}}
    try:
        async with asyncio.timeout(HUNG_S), session.post(url + GENERATE, json=short) as answer:
            return answer.ok
    except (TimeoutError, aiohttp.ClientError, ConnectionError):
        return False


def _errors(stream: bytes) -> Iterator[int]:
    """Yield the codes of errors in a stream."""
    for line in stream.split(b"\n"):
        if line.startswith(b"data: {"):
            error = json.loads(line.removeprefix(b"data: ")).get("error")
            if isinstance(error, dict):
                yield int(error.get("code") or 500)


@dataclass
class Probe:
    """A request that always runs, one after another.

    Attributes:
        texts: how often each text came: one, if no other request's text can be seen in it.
        gaps: the longest times between two of its tokens [s], and the bodies that were under way.
        usual: some of all those times.
    """

    texts: Counter[str] = field(default_factory=Counter)
    gaps: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)
    usual: list[float] = field(default_factory=list)

    async def run(self, session: aiohttp.ClientSession, url: str, under_way: dict[int, Body]) -> None:
        """Ask until cancelled."""
        while True:
            text, last = "", 0.0
            async with session.post(url + GENERATE, json=PROBE) as response:
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    now, part = time.monotonic(), json.loads(line.removeprefix(b"data: "))
                    text = part.get("text", "")
                    if last:
                        heapq.heappush(self.gaps, (now - last, tuple(under_way)))
                        if len(self.gaps) > _KEPT_GAPS:
                            heapq.heappop(self.gaps)
                        self.usual.append(now - last)
                    last = now
            self.texts[text] += 1


class Traffic:
    """The users of one server: they send bodies until all are sent or the server has ended.

    Args:
        url: the server's.
        bodies: yields numbers and bodies.
        users: at once.
        sessions: whether bodies name sessions, which are closed and opened again all the time.
    """

    def __init__(self, url: str, bodies: Iterator[tuple[int, Body]], users: int, *, sessions: bool = False) -> None:
        self._url, self._bodies, self._users, self._sessions = url, bodies, users, sessions
        self._under_way: dict[int, Body] = {}
        self._over = False
        self.answers: dict[int, Answer] = {}
        self.last: dict[int, Body] = {}
        self.probe = Probe()

    async def run(self) -> bool:
        """Return whether the server still stood when all was sent; else ``last`` are the bodies that it had then."""
        async with open_session() as session:
            probe = asyncio.create_task(self.probe.run(session, self._url, self._under_way))
            turns = asyncio.create_task(self._renew_sessions(session)) if self._sessions else None
            users = [asyncio.create_task(self._user(session)) for _ in range(self._users)]
            await asyncio.gather(*users)
            if probe.done():
                self._fall()
            tasks = [probe, turns] if turns else [probe]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return not self._over

    async def _renew_sessions(self, session: aiohttp.ClientSession) -> None:
        for number, name in enumerate(itertools.cycle(SESSIONS)):
            opened = {"session_id": name, "capacity_of_str_len": 1000, "streaming": bool(number % 2)}
            for path, fields in (("/close_session", {"session_id": name}), ("/open_session", opened)):
                async with session.post(self._url + path, json=fields) as answer:
                    await answer.read()
            await asyncio.sleep(0 if number < len(SESSIONS) else _TURNS_S)

    async def _user(self, session: aiohttp.ClientSession) -> None:
        for number, body in self._bodies:
            self._under_way[number] = body
            answer = await send(session, self._url, body)
            self.answers[number] = answer
            if answer.status in (ENDED, HUNG):
                self._fall()
            self._under_way.pop(number, None)
            if self._over:
                return

    def _fall(self) -> None:
        if not self._over:
            self._over, self.last = True, dict(self._under_way)


def without_speculation(body: Body) -> Body:
    """Return what a server without DSPARK is asked in its place, to be read whole."""
    fields = {key: value for key, value in body.fields.items() if key != "speculation"}
    return Body(body.path, fields, body.mode if body.mode in ("whole", "stream") else "whole")


def is_determined(body: Body) -> bool:
    """Return whether the text of a body is the same on every server, except for near-ties."""
    asked = body.fields.get("sampling_params") if body.path == GENERATE else body.fields
    return body.mode == "whole" and isinstance(asked, dict) and asked.get("temperature") == 0
