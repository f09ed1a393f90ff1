"""Streaming clients of an OpenAI API: users that wait for their answers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import aiohttp

from serving.prompts import Prompt
from sglang_dspark.errors import DSparkError

CHAT_PATH = "/v1/chat/completions"
RAW_PATH = "/v1/completions"
ANSWER_S = 600.0
"""Longest time for one answer."""


class ReplyError(DSparkError):
    """The server answered with an error, or its stream ended early."""


@dataclass(frozen=True)
class Sampling:
    """The request parameters of every prompt of a sweep.

    Attributes:
        raw: send the text as it is (``/v1/completions``) instead of through the chat template.
    """

    max_tokens: int
    temperature: float
    ignore_eos: bool = False
    raw: bool = False

    @property
    def path(self) -> str:
        """Return the route that prompts are sent to."""
        return RAW_PATH if self.raw else CHAT_PATH


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
        tokens: generated tokens when each chunk arrived; empty if the server does not tell.
        kept: steps of the request by the number of drafts that they kept; empty if the server does not tell.
    """

    prompt_index: int
    sent_s: float
    chunks_s: tuple[float, ...]
    done_s: float
    num_tokens: int
    num_prompt_tokens: int
    text: str
    tokens: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()

    @property
    def ttft_s(self) -> float:
        """Return the time to first token; the whole time when the answer has no text."""
        return (self.chunks_s[0] if self.chunks_s else self.done_s) - self.sent_s

    @property
    def total_s(self) -> float:
        """Return the time from sending to the last token."""
        return self.done_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Return the mean time per output token after the first; None when nothing came after the first chunk."""
        elapsed_s = self.total_s - self.ttft_s
        return elapsed_s / (self.num_tokens - 1) if self.num_tokens > 1 and elapsed_s > 0 else None

    @property
    def gaps_s(self) -> list[float]:
        """Return the times between chunks (inter-token latencies as a reader sees them)."""
        return [later - earlier for earlier, later in pairwise(self.chunks_s)]


def ask_all(
    url: str,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    users: int,
    on_first: Callable[[], object] = lambda: None,
) -> list[Reply]:
    """Return the answers to ``prompts``, in their order.

    Args:
        url: of the server, without a trailing slash.
        users: so many wait for an answer before they send the next prompt.
        on_first: called with the first text of each answer.

    Raises:
        ReplyError: one of the requests failed; the others are cancelled.
    """
    return asyncio.run(_ask_all(url, prompts, sampling, users, on_first))


async def _ask_all(
    url: str, prompts: Sequence[Prompt], sampling: Sampling, users: int, on_first: Callable[[], object]
) -> list[Reply]:
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    connector = aiohttp.TCPConnector(limit=0)
    free = asyncio.Semaphore(users)  # users get their turns in the order of the prompts
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def ask(prompt: Prompt) -> Reply:
            async with free:
                return await _ask(session, url, prompt, sampling, on_first)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(ask(prompt)) for prompt in prompts]
        except ExceptionGroup as failures:
            first = failures.exceptions[0]
            if isinstance(first, ReplyError):
                raise first from None
            raise ReplyError(f"{url}: {type(first).__name__}: {first}") from first
    return [task.result() for task in tasks]


async def _ask(
    session: aiohttp.ClientSession, url: str, prompt: Prompt, sampling: Sampling, on_first: Callable[[], object]
) -> Reply:
    chunks_s: list[float] = []
    pieces: list[str] = []
    tokens: list[int] = []
    done_s, usage, details = None, None, {}
    sent_s = time.perf_counter()
    async with session.post(url + sampling.path, json=request_body(prompt, sampling)) as response:
        await _check(response)
        async for event in _events(response):
            now_s = time.perf_counter()
            usage = event.get("usage") or usage
            details = (event.get("sglext") or {}).get("spec_tokens_details") or details
            for choice in event.get("choices", ()):
                piece = choice["text"] if sampling.raw else choice["delta"].get("content")
                if piece:
                    if not pieces:
                        on_first()
                    chunks_s.append(now_s)
                    pieces.append(piece)
                    tokens += [usage["completion_tokens"]] if usage else []
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
        tokens=tuple(tokens),
        kept=tuple(details.get("spec_correct_drafts_histogram", ())),
    )


def request_body(prompt: Prompt, sampling: Sampling) -> dict[str, Any]:
    """Return what is sent to :attr:`Sampling.path` for a streamed answer."""
    content = {"prompt": prompt.text} if sampling.raw else {"messages": [{"role": "user", "content": prompt.text}]}
    return {
        **content,
        "model": "default",
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "ignore_eos": sampling.ignore_eos,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "return_spec_tokens_details": True,
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
