"""Sends odd requests beside a neighbour who wants his text."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp

from fuzzing.bodies import Sent

HANG_S = 60.0
LATE_MS = 50.0
"""How much later than usual a neighbour's text may come."""
NEIGHBOUR: dict[str, Any] = {
    "input_ids": [5, 9, 7, 21, 29, 33],
    "sampling_params": {"temperature": 0, "max_new_tokens": 64, "ignore_eos": True},
    "stream": True,
}


@dataclass
class Tally:
    """What became of the requests.

    Attributes:
        answers: by kind and HTTP status.
        errors: the first of each kind with an HTTP 5xx: its status, body and answer.
        hangs: kinds of those without an answer in time.
        slowest_s: the slowest answer and its kind.
        times: (kind, when it was sent, when it was answered) of all of them.
        broken: requests whose answer broke off, the whole server's end among the reasons.
        ended: whether the server was gone before the last request.
    """

    answers: Counter[str] = field(default_factory=Counter)
    errors: dict[str, tuple[int, str, str]] = field(default_factory=dict)
    hangs: list[str] = field(default_factory=list)
    slowest_s: tuple[float, str] = (0.0, "")
    times: list[tuple[str, float, float]] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    ended: bool = False

    @property
    def passed(self) -> bool:
        """Return whether every request got an answer, and none an HTTP 5xx."""
        return not (self.num_errors or self.hangs or self.broken or self.ended)

    @property
    def num_errors(self) -> int:
        """Answers with an HTTP 5xx."""
        return sum(count for name, count in self.answers.items() if name.rsplit(maxsplit=1)[-1].startswith("5"))


class Neighbour:
    """Asks for the same greedy text again and again, in a thread of its own.

    Attributes:
        texts: what it got, token by token.
        gaps: (from, to) between two arrivals of one text, in seconds of ``time.perf_counter``.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self.texts: list[list[int]] = []
        self.gaps: list[tuple[float, float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def gaps_ms(self) -> list[float]:
        """Milliseconds of :attr:`gaps`."""
        return [1e3 * (end - begin) for begin, end in self.gaps]

    @property
    def asks(self) -> bool:
        """Return whether it goes on asking; it gives up when the server has ended."""
        return self._thread.is_alive()

    async def _run(self) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10 * HANG_S)) as session:
            while not self._over.is_set():
                try:
                    self.texts.append(await self._text(session))
                except aiohttp.ClientError:
                    self.texts.append([])  # a wrong text
                    return

    async def _text(self, session: aiohttp.ClientSession) -> list[int]:
        ids: list[int] = []
        before = None
        async with session.post(self._url + "/generate", json=NEIGHBOUR) as response:
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                now = time.perf_counter()
                ids = json.loads(line.removeprefix(b"data: ")).get("output_ids", [])  # all of them so far
                if before is not None:
                    self.gaps.append((before, now))
                before = now
        return ids


def alone(url: str, texts: int) -> Neighbour:
    """The neighbour without anybody beside him, for so many texts."""
    with Neighbour(url) as neighbour:
        while neighbour.asks and len(neighbour.texts) < texts:
            time.sleep(0.02)
    return neighbour


def send(url: str, requests: list[Sent], users: int) -> Tally:
    """Send ``requests``, ``users`` at a time."""
    tally = Tally()
    asyncio.run(_send_all(url, requests[::-1], users, tally))
    return tally


def slow_moments(neighbour: Neighbour, tally: Tally, number: int) -> list[tuple[float, list[str]]]:
    """The neighbour's longest gaps in milliseconds, each with what others had under way when it began or in it."""
    slowest = sorted(neighbour.gaps, key=lambda gap: gap[0] - gap[1])[:number]
    return [
        (1e3 * (end - begin), sorted(kind for kind, sent, answered in tally.times if sent < end and answered > begin))
        for begin, end in slowest
    ]


async def _send_all(url: str, requests: list[Sent], users: int, tally: Tally) -> None:
    timeout = aiohttp.ClientTimeout(total=HANG_S)
    # A connection each: one that is kept may be closed by the server just when it is used again.
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session, asyncio.TaskGroup() as group:
        for _ in range(users):
            group.create_task(_user(session, url, requests, tally))


async def _user(session: aiohttp.ClientSession, url: str, requests: list[Sent], tally: Tally) -> None:
    while requests:
        sent = requests.pop()
        began = time.perf_counter()
        try:
            outcome = await _answer(session, url, sent, tally)
        except TimeoutError:
            tally.hangs.append(sent.kind)
            outcome = "hangs"
        except aiohttp.ClientConnectorError:
            tally.ended = True
            requests.clear()
            return
        except aiohttp.ClientError as error:
            tally.broken.append(f"{sent.kind}: {sent.path} {sent.body[:500]!r}")
            outcome = type(error).__name__
        tally.answers[f"{sent.kind} {outcome}"] += 1
        ended = time.perf_counter()
        tally.times.append((sent.kind, began, ended))
        tally.slowest_s = max(tally.slowest_s, (ended - began, sent.kind))


async def _answer(session: aiohttp.ClientSession, url: str, sent: Sent, tally: Tally) -> str:
    async with session.request(sent.method, url + sent.path, data=sent.body, headers=sent.headers) as response:
        if sent.leaves:
            await response.content.read(1)
            return "left"  # leaving the block closes the connection
        text = await response.text(errors="replace")
        if response.status >= 500:
            tally.errors.setdefault(sent.kind, (response.status, repr(sent.body[:500]), text[:500]))
        return str(response.status)
