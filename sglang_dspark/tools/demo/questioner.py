"""Ask a running server one prompt after the other through the OpenAI API."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_dspark.tools.launch import LaunchedServer

WARM_UP_PROMPT = "Count from one to twenty."


@dataclass(frozen=True)
class Answer:
    """One complete answer.

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

    @property
    def tokens_per_second(self) -> float:
        """Speed that the user sees, prefill included."""
        return self.num_tokens / self.seconds


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

    def warm_up(self, max_tokens: int) -> None:
        """Send one request that is not measured, then empty the prefix cache, so that every prompt is prefilled.

        Raises:
            openai.OpenAIError: the server refused the request or has died.
            urllib.error.URLError: it could not empty its cache.
        """
        self.ask(WARM_UP_PROMPT, max_tokens)
        self._server.flush_cache()

    def ask(self, prompt: str, max_tokens: int) -> Answer:
        """The greedy answer to ``prompt``.

        Raises:
            openai.OpenAIError: the server refused the request or has died.
        """
        committed, rounds = self._progress_so_far()
        pieces: list[str] = []
        num_tokens = 0
        options: Any = {
            "model": "default",
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        start = time.perf_counter()
        if self._chat:
            messages: Any = [{"role": "user", "content": prompt}]
            stream = self._client.chat.completions.create(messages=messages, **options)
        else:
            stream = self._client.completions.create(prompt=prompt, **options)
        for chunk in stream:
            if chunk.usage is not None:
                num_tokens = chunk.usage.completion_tokens
            pieces += [(choice.delta.content if self._chat else choice.text) or "" for choice in chunk.choices]
        seconds = time.perf_counter() - start
        committed_after, rounds_after = self._progress_so_far()
        return Answer("".join(pieces), num_tokens, seconds, rounds_after - rounds, committed_after - committed)

    def _progress_so_far(self) -> tuple[int, int]:
        """Tokens committed and rounds since the server started."""
        if not self._speculative:
            return 0, 0
        stats: dict[str, Any] = self._server.get_json("/dspark/stats")
        return stats["committed_tokens"], stats["rounds"]


def has_chat_template(target_dir: Path) -> bool:
    """Return whether the target's tokenizer knows how to write a conversation; a base model only continues text."""
    if (target_dir / "chat_template.jinja").is_file():
        return True
    settings = target_dir / "tokenizer_config.json"
    return settings.is_file() and "chat_template" in json.loads(settings.read_text(encoding="utf-8"))
