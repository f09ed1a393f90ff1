"""Ask a server some prompts through the OpenAI API, and compare the answers of two servers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_dspark.tools.launch import LaunchedServer

PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "What is the capital of France, and what is it known for?",
    "Natalia sold 48 clips in April and half as many in May. How many clips did she sell in total? Think step by step.",
    "Explain in simple words why the sky is blue.",
)
WARM_UP_PROMPT = "Count from one to twenty."
WARM_UP_TOKENS = 16

OnText = Callable[[str], None]


@dataclass(frozen=True)
class Answer:
    """One streamed answer.

    Attributes:
        text: the whole text.
        num_tokens: tokens generated, as the server counts them.
        seconds: from sending the request to the end of the stream.
        num_rounds: decode rounds, that is target forwards after the prefill; 0 on a server without DSPARK.
        num_committed: tokens that these rounds gained.
    """

    text: str
    num_tokens: int
    seconds: float
    num_rounds: int
    num_committed: int


class Questioner:
    """The official OpenAI client, pointed at a running server."""

    def __init__(self, server: LaunchedServer, *, chat: bool, speculative: bool) -> None:
        import httpx
        import openai

        self._server = server
        self._chat = chat
        self._speculative = speculative
        # Proxies of the environment are for the outside world, hence trust_env=False.
        self._client = openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="unused", http_client=httpx.Client(trust_env=False, timeout=600.0)
        )

    def warm_up(self) -> None:
        """Send one request that is not measured."""
        self.ask(WARM_UP_PROMPT, WARM_UP_TOKENS, lambda _: None)

    def ask(self, prompt: str, max_tokens: int, on_text: OnText) -> Answer:
        """Stream the greedy answer to ``prompt``, handing every piece of text to ``on_text`` as it comes."""
        committed, rounds = self._progress_so_far()
        pieces: list[str] = []
        num_tokens = 0
        start = time.perf_counter()
        options: Any = {
            "model": "default",
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._chat:
            messages: Any = [{"role": "user", "content": prompt}]
            stream = self._client.chat.completions.create(messages=messages, **options)
        else:
            stream = self._client.completions.create(prompt=prompt, **options)
        for chunk in stream:
            if chunk.usage is not None:
                num_tokens = chunk.usage.completion_tokens
            for choice in chunk.choices:
                piece = (choice.delta.content if self._chat else choice.text) or ""
                pieces.append(piece)
                on_text(piece)
        seconds = time.perf_counter() - start
        committed_after, rounds_after = self._progress_so_far()
        return Answer("".join(pieces), num_tokens, seconds, rounds_after - rounds, committed_after - committed)

    def _progress_so_far(self) -> tuple[int, int]:
        """Tokens committed and rounds since the server started."""
        if not self._speculative:
            return 0, 0
        stats: dict[str, Any] = self._server.get_json("/dspark/stats")
        return stats["committed_tokens"], stats["rounds"]


def accept_length(answers: Sequence[Answer]) -> float | None:
    """Tokens per decode round over all answers, bonus token included; None without DSPARK."""
    num_rounds = sum(answer.num_rounds for answer in answers)
    return sum(answer.num_committed for answer in answers) / num_rounds if num_rounds else None


def has_chat_template(target_dir: Path) -> bool:
    """Whether the target's tokenizer knows how to write a conversation; a base model only continues text."""
    if (target_dir / "chat_template.jinja").is_file():
        return True
    settings = target_dir / "tokenizer_config.json"
    return settings.is_file() and "chat_template" in json.loads(settings.read_text(encoding="utf-8"))


def tokens_per_second(answers: Sequence[Answer]) -> float:
    """Tokens of all answers over the seconds of all answers, prefill included."""
    return sum(answer.num_tokens for answer in answers) / sum(answer.seconds for answer in answers)


def first_difference(left: str, right: str) -> int | None:
    """Index of the first character that differs, None for equal texts."""
    if left == right:
        return None
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(left), len(right)))
