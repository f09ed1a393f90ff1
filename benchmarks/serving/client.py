"""Closed-loop client: a fixed number of users, each of whom sends the next prompt when the last answer is complete."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import aiohttp

from serving.prompts import Prompt
from sglang_dspark.errors import DSparkError

CHAT_PATH = "/v1/chat/completions"
RAW_PATH = "/v1/completions"
FLUSH_TIMEOUT_S = 60


class ReplyError(DSparkError):
    """The server answered with an error, or its stream ended early."""


@dataclass(frozen=True)
class Sampling:
    """How every prompt of a sweep is asked.

    Attributes:
        raw: send the text as it is (``/v1/completions``) instead of through the chat template.
        timeout_s: longest time for one answer.
    """

    max_tokens: int
    temperature: float
    ignore_eos: bool = False
    raw: bool = False
    timeout_s: float = 600.0


@dataclass(frozen=True)
class Reply:
    """One streamed answer. Times are seconds of ``time.perf_counter``.

    Attributes:
        prompt_index: line of the prompt file.
        sent_s: when the request was sent.
        chunks_s: arrival of every chunk with text; under speculation a chunk holds the tokens of one step.
        done_s: arrival of the chunk that gave the finish reason, thus of the last token.
        num_tokens: generated tokens, by the server's ``usage``.
        num_prompt_tokens: tokens of the prompt, by the server's ``usage``.
        text: the answer.
    """

    prompt_index: int
    sent_s: float
    chunks_s: tuple[float, ...]
    done_s: float
    num_tokens: int
    num_prompt_tokens: int
    text: str

    @property
    def ttft_s(self) -> float:
        """Time to first token; the whole time when the answer has no text."""
        return (self.chunks_s[0] if self.chunks_s else self.done_s) - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None when nothing came after the first chunk."""
        elapsed_s = self.done_s - self.sent_s - self.ttft_s
        return elapsed_s / (self.num_tokens - 1) if self.num_tokens > 1 and elapsed_s > 0 else None

    @property
    def gaps_s(self) -> list[float]:
        """Times between chunks (inter-token latencies as a reader sees them)."""
        return [later - earlier for earlier, later in pairwise(self.chunks_s)]


def ask_all(
    url: str,
    prompts: Sequence[Prompt],
    concurrency: int,
    sampling: Sampling,
    on_reply: Callable[[], None] = lambda: None,
) -> list[Reply]:
    """Answers to ``prompts``, in the order of the prompts, with ``concurrency`` users.

    Args:
        url: base URL of the server.
        on_reply: called after every answer.

    Raises:
        ReplyError: one of the requests failed; the others are cancelled.
    """
    return asyncio.run(_ask_all(url, prompts, concurrency, sampling, on_reply))


def flush_cache(url: str) -> None:
    """Empty the server's radix cache.

    Raises:
        ReplyError: the server refused or cannot be reached.
    """
    try:
        asyncio.run(_flush_cache(url))
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ReplyError(f"{url}/flush_cache: {type(error).__name__}: {error}") from error


async def _flush_cache(url: str) -> None:
    timeout = aiohttp.ClientTimeout(total=2 * FLUSH_TIMEOUT_S)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        # The server waits until its last batch is done; without a timeout it refuses right after a request.
        session.post(f"{url}/flush_cache", params={"timeout": FLUSH_TIMEOUT_S}) as response,
    ):
        await _check(response)


async def _ask_all(
    url: str,
    prompts: Sequence[Prompt],
    concurrency: int,
    sampling: Sampling,
    on_reply: Callable[[], None],
) -> list[Reply]:
    replies: dict[int, Reply] = {}
    todo = iter(enumerate(prompts))

    async def user(session: aiohttp.ClientSession, todo: Iterator[tuple[int, Prompt]]) -> None:
        for slot, prompt in todo:
            replies[slot] = await _ask(session, url, prompt, sampling)
            on_reply()

    timeout = aiohttp.ClientTimeout(total=sampling.timeout_s)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(concurrency, len(prompts))):
                    group.create_task(user(session, todo))
        except ExceptionGroup as failures:
            first = failures.exceptions[0]
            if isinstance(first, ReplyError):
                raise first from None
            raise ReplyError(f"{url}: {type(first).__name__}: {first}") from first
    return [replies[slot] for slot in range(len(prompts))]


async def _ask(session: aiohttp.ClientSession, url: str, prompt: Prompt, sampling: Sampling) -> Reply:
    chunks_s: list[float] = []
    pieces: list[str] = []
    done_s, usage = None, None
    sent_s = time.perf_counter()
    async with session.post(url + (RAW_PATH if sampling.raw else CHAT_PATH), json=_body(prompt, sampling)) as response:
        await _check(response)
        async for event in _events(response):
            now_s = time.perf_counter()
            usage = event.get("usage") or usage
            for choice in event.get("choices", ()):
                piece = choice["text"] if sampling.raw else choice["delta"].get("content")
                if piece:
                    chunks_s.append(now_s)
                    pieces.append(piece)
                if choice.get("finish_reason"):
                    done_s = now_s
    if done_s is None or usage is None:
        raise ReplyError(f"{url}: the stream of prompt {prompt.index} ended without a finish reason or usage")
    return Reply(
        prompt_index=prompt.index,
        sent_s=sent_s,
        chunks_s=tuple(chunks_s),
        done_s=done_s,
        num_tokens=usage["completion_tokens"],
        num_prompt_tokens=usage["prompt_tokens"],
        text="".join(pieces),
    )


def _body(prompt: Prompt, sampling: Sampling) -> dict[str, Any]:
    content = {"prompt": prompt.text} if sampling.raw else {"messages": [{"role": "user", "content": prompt.text}]}
    return {
        **content,
        "model": "default",
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "ignore_eos": sampling.ignore_eos,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in response.content:
        payload = line.removeprefix(b"data:").strip()
        if line.startswith(b"data:") and payload != b"[DONE]":
            event = json.loads(payload)
            if "error" in event:
                raise ReplyError(f"{response.url}: {event['error']}")
            yield event


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        raise ReplyError(f"{response.url}: HTTP {response.status}: {(await response.text())[:500]}")
