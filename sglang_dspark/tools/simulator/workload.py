"""Simulated requests, and how long they are."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Self

import numpy as np

from sglang_dspark.errors import ConfigError
from sglang_dspark.scheduling.slo import SloState


@dataclass
class Request:
    """One request, and what became of it. Times are milliseconds since the start.

    Attributes:
        index: number of the request, which is also that of its text.
        sent_ms: when the user sent it.
        first_ms, done_ms: when its first and its last token reached the user.
        read_tokens: prompt tokens that were read.
        known_tokens: output tokens that the host knows of.
        gaps_ms: how long after the tokens before them further ones reached the user.
        user: number of the user that sent it.
        slo: the answer against its SLO.
    """

    index: int
    prompt_tokens: int
    output_tokens: int
    sent_ms: float = 0.0
    first_ms: float = 0.0
    done_ms: float = 0.0
    read_tokens: int = 0
    known_tokens: int = 0
    gaps_ms: list[float] = field(default_factory=list)
    user: int = 0
    slo: SloState = field(default_factory=SloState)
    _last_ms: float = 0.0

    @property
    def context(self) -> int:
        """Return the tokens whose K/V is in the cache, as far as the host knows."""
        return self.prompt_tokens + self.known_tokens

    @property
    def done(self) -> bool:
        """Return whether its last token is known."""
        return self.known_tokens >= self.output_tokens

    def tell(self, now_ms: float, tokens: int) -> None:
        """Tell its user so many tokens more."""
        if self.known_tokens:
            self.gaps_ms.append(now_ms - self._last_ms)
        else:
            self.first_ms = now_ms
        self.known_tokens, self._last_ms = self.known_tokens + tokens, now_ms

    @property
    def user_tok_s(self) -> float:
        """Return the tokens per second from sending to the last token."""
        return 1e3 * self.output_tokens / (self.done_ms - self.sent_ms)

    @property
    def tpot_ms(self) -> float | None:
        """Return the time per output token after the first; None for a single one."""
        return (self.done_ms - self.first_ms) / (self.output_tokens - 1) if self.output_tokens > 1 else None


@dataclass(frozen=True)
class Lengths:
    """A distribution of token counts: ``128`` always, ``64-256`` uniform, ``~128`` geometric with that mean."""

    low: int
    high: int
    geometric: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read one of the forms above.

        Raises:
            ConfigError: it is none of them.
        """
        try:
            if text.startswith("~"):
                lengths = cls(int(text[1:]), int(text[1:]), geometric=True)
            else:
                low, _, high = text.partition("-")
                lengths = cls(int(low), int(high or low))
        except ValueError as error:
            raise ConfigError(f"{text!r} is no length; write 128, 64-256 (uniform) or ~128 (geometric)") from error
        if not 1 <= lengths.low <= lengths.high:
            raise ConfigError(f"{text!r} is no length: tokens count from 1, and ranges run upwards")
        return lengths

    def draw(self, rng: np.random.Generator) -> int:
        """Draw one token count."""
        return int(rng.geometric(1 / self.low)) if self.geometric else int(rng.integers(self.low, self.high + 1))


@dataclass(frozen=True)
class Workload:
    """Requests of users; each user sends the next one when its last answer is complete.

    Attributes:
        num_requests: of these users together.
        tpot_ms: SLO of time per token of every second user; None for no SLO.
        long_prompt: tokens of the prompts that one user more sends until the others have all of their answers; None for
            no such user.
    """

    num_requests: int
    prompt: Lengths
    output: Lengths
    users: int
    tpot_ms: float | None = None
    long_prompt: int | None = None

    def requests(self, rng: np.random.Generator) -> Iterator[Request]:
        """Draw the requests, in the order in which they are sent."""
        for index in range(self.num_requests):
            yield Request(index, self.prompt.draw(rng), self.output.draw(rng))

    def long_requests(self, rng: np.random.Generator) -> Iterator[Request]:
        """Draw the requests of the user of long prompts, without end."""
        assert self.long_prompt is not None, "there is no such user without"
        for index in count(self.num_requests):
            yield Request(index, self.long_prompt, self.output.draw(rng))

    def slo(self, user: int) -> SloState:
        """Return the SLO of the requests of a user."""
        return SloState(self.tpot_ms if user % 2 and user < self.users else None)
