"""Send the same prompts to two servers, in turns over three ways of decoding."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_dspark.tools.launch import LaunchedServer

WARM_UP_PROMPT, WARM_UP_TOKENS = "Count from one to twenty.", 8
"""What a server answers, and throws away, before each answer that counts."""


@dataclass(frozen=True)
class Mode:
    """A way of decoding that is compared.

    Attributes:
        name: what tables call it.
        policy: the policy of the server with DSPARK; None: the server without the plugin.
    """

    name: str
    policy: str | None


PLAIN = Mode("plain SGLang", None)
OFF = Mode("plugin, off", "off")
AUTO = Mode("plugin, auto", "auto")
MODES = (PLAIN, OFF, AUTO)


@dataclass(frozen=True)
class Turn:
    """One question: a prompt by its index, in a round that is counted from 0."""

    round: int
    prompt: int
    mode: Mode


@dataclass(frozen=True)
class Answer:
    """One complete answer.

    Attributes:
        text: the whole text.
        tokens_per_second: the speed that the user sees, prefill included.
        num_rounds: decode rounds, that is target forwards after the prefill; 0 without DSPARK.
        num_committed: tokens that these rounds gained.
    """

    text: str
    tokens_per_second: float
    num_rounds: int
    num_committed: int


def schedule(num_prompts: int, num_rounds: int, seed: int = 0) -> Iterator[Turn]:
    """Yield the turns in their order.

    The modes answer a prompt right after one another, so that drift of the machine meets them alike. Their order is
    shuffled: a fixed one would let each mode always follow the same other mode.
    """
    shuffle = random.Random(seed)
    for index in range(num_rounds):
        for prompt in range(num_prompts):
            for mode in shuffle.sample(MODES, len(MODES)):
                yield Turn(index, prompt, mode)


class Contest:
    """The turns on running servers. Between its turns a server is suspended: an idle one may take the other's cores.

    Args:
        plain, dspark: both suspended already.
        chat: whether prompts go through the target's chat template.
    """

    def __init__(self, plain: LaunchedServer, dspark: LaunchedServer, max_tokens: int, *, chat: bool) -> None:
        self._plain, self._dspark, self._max_tokens, self._chat = plain, dspark, max_tokens, chat

    def ask(self, prompt: str, mode: Mode) -> Answer:
        """Wake the server of the mode, throw one answer away, and measure the greedy one to the prompt.

        Raises:
            OSError: the server refused a request or has died.
        """
        server = self._plain if mode.policy is None else self._dspark
        server.resume()
        if mode.policy is not None:
            server.post_json("/dspark/policy", {"policy": mode.policy})
        self._complete(server, WARM_UP_PROMPT, WARM_UP_TOKENS)
        server.flush_cache()
        before, start = self._counters(mode), time.perf_counter()
        answer = self._complete(server, prompt, self._max_tokens)
        seconds, after = time.perf_counter() - start, self._counters(mode)
        server.suspend()
        [choice] = answer["choices"]
        text = (choice["message"]["content"] if self._chat else choice["text"]) or ""
        rounds, committed = (now - then for now, then in zip(after, before, strict=True))
        return Answer(text, answer["usage"]["completion_tokens"] / seconds, rounds, committed)

    def _complete(self, server: LaunchedServer, prompt: str, max_tokens: int) -> Any:
        options = {"model": "default", "max_tokens": max_tokens, "temperature": 0.0}
        if self._chat:
            messages = [{"role": "user", "content": prompt}]
            return server.post_json("/v1/chat/completions", {"messages": messages, **options})
        return server.post_json("/v1/completions", {"prompt": prompt, **options})

    def _counters(self, mode: Mode) -> tuple[int, int]:
        """Return rounds and committed tokens since the server started."""
        stats = self._dspark.get_json("/dspark/stats") if mode.policy is not None else {}
        return stats.get("rounds", 0), stats.get("committed_tokens", 0)


def has_chat_template(target_dir: Path) -> bool:
    """Return whether the target has a chat template; a base model only continues text."""
    settings = target_dir / "tokenizer_config.json"
    in_settings = settings.is_file() and '"chat_template"' in settings.read_text(encoding="utf-8")
    return in_settings or (target_dir / "chat_template.jinja").is_file()


Answers = dict[Turn, Answer]


def answers_of(answers: Answers, mode: Mode, prompt: int | None = None) -> list[Answer]:
    """Return the answers of one mode, to one prompt or to all, in the order of rounds and prompts."""
    turns = sorted((t for t in answers if t.mode == mode), key=lambda turn: (turn.round, turn.prompt))
    return [answers[turn] for turn in turns if prompt in (None, turn.prompt)]


def ratios(answers: Answers, faster: Mode, slower: Mode, prompt: int | None = None) -> list[float]:
    """Return how many times as fast one mode answered as another: the same prompt in the same round makes a pair."""
    pairs = zip(answers_of(answers, faster, prompt), answers_of(answers, slower, prompt), strict=True)
    return [left.tokens_per_second / right.tokens_per_second for left, right in pairs]


def accept_length(answers: Sequence[Answer]) -> float:
    """Return the tokens per decode round over all answers of DSPARK, bonus token included; NaN without a round."""
    num_rounds = sum(answer.num_rounds for answer in answers)
    return sum(answer.num_committed for answer in answers) / num_rounds if num_rounds else float("nan")
