"""Simulated work: requests, chunks of their prompts, and draft blocks with confidences and outcomes."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count, repeat
from math import inf
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from sglang_dspark.config import DSparkConfig
from sglang_dspark.errors import ConfigError
from sglang_dspark.files import lines_of
from sglang_dspark.scheduling.policies import ChunkLimit, ExtraRows, verified_sooner
from sglang_dspark.scheduling.schedule import SloState
from sglang_dspark.scheduling.sps_table import SpsTable


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


CHUNK_TOKENS = 8192
"""Tokens of a chunk, as SGLang has them on an H200."""


class Piece(NamedTuple):
    """The tokens of a prompt that a step reads: ``tokens`` of them, after ``context`` tokens."""

    request: Request
    context: int
    tokens: int


@dataclass(frozen=True)
class Chunk:
    """The prompts that a step reads."""

    pieces: Sequence[Piece] = ()

    @property
    def tokens(self) -> int:
        return sum(piece.tokens for piece in self.pieces)

    @property
    def attended(self) -> int:
        """Return how many pairs there are of a token and one before it, which it attends to."""
        return sum(piece.tokens * (2 * piece.context + piece.tokens) // 2 for piece in self.pieces)

    @property
    def read(self) -> list[Request]:
        """Return the requests whose prompts it completes."""
        return [one.request for one in self.pieces if one.context + one.tokens == one.request.prompt_tokens]


class Prompts:
    """The rules of a server for prompts.

    Args:
        table: of step times.
        options: of the server; ``prompt_rows`` and ``max_gap_ms`` count.
        mixed: whether running requests get tokens with prompts, as with ``--enable-mixed-chunk``.

    Attributes:
        limit: of a chunk's rows while requests run; None without a bound on gaps.
    """

    def __init__(self, table: SpsTable, options: DSparkConfig, *, mixed: bool) -> None:
        if options.max_gap_ms is not None and not mixed:
            raise ConfigError(
                f"--max-gap-ms {options.max_gap_ms:g} cuts the chunks of prompts that run with decode steps; pass "
                "--mixed-chunk, or drop it"
            )
        self.mixed = mixed
        self.limit = None if options.max_gap_ms is None else ChunkLimit(options.max_gap_ms)
        self._width = table.gamma + 1
        self._table, self._asked, self._bound_ms = table, options.prompt_rows, options.max_gap_ms or inf

    def next_chunk(self, waiting: deque[Request], running: int) -> Chunk | None:
        """Take the next chunk from the prompts that wait, while so many requests run; None without any."""
        left = CHUNK_TOKENS
        if self.mixed and running:
            left = max(CHUNK_TOKENS if self.limit is None else self.limit.rows_with(running), running + 1) - running
        pieces = []
        while waiting and left > 0:
            request = waiting[0]
            piece = Piece(request, request.read_tokens, min(left, request.prompt_tokens - request.read_tokens))
            request.read_tokens += piece.tokens
            left -= piece.tokens
            pieces.append(piece)
            if request.read_tokens == request.prompt_tokens:
                waiting.popleft()
        return Chunk(pieces) if pieces else None

    def verified(self, chunk: Chunk, running: int = 0) -> ExtraRows | None:
        """Return how a chunk is verified, together with so many requests; None if it is prefilled."""
        table, rows = self._table, chunk.tokens
        requests = sum(-(-piece.tokens // self._width) for piece in chunk.pieces)
        if table.tiers and (requests + running > table.requests[-1] or rows + running * self._width > table.tiers[-1]):
            return None
        context = chunk.attended / rows
        if self._asked is not None:
            verified = rows <= self._asked
        else:  # a CPU has to be asked
            verified = bool(table.tiers) and verified_sooner(table, requests, rows, context)
        return ExtraRows(requests, rows, context, self._bound_ms) if verified else None


FORMAT_VERSION = 1
_FORMAT = "sglang-dspark blocks"
# Probabilities of 0 and 1 have no logit.
_EDGE = 1e-4
_BLOCKS_AHEAD = 64  # to draw one at a time takes as long as to simulate the step

Ints = NDArray[np.int64]


class BlockSource(Protocol):
    """Draws blocks.

    Attributes:
        gamma: drafts per block.
        name: for tables and figures.
    """

    @property
    def gamma(self) -> int: ...

    @property
    def name(self) -> str: ...

    def draw(self, requests: Sequence[int], rng: np.random.Generator) -> tuple[NDArray[np.float64] | None, Ints]:
        """Draw a block for each of ``requests``.

        Returns:
            ``(logits [n, gamma] of the confidence head, accepted [n])``: drafts that the target would accept if it
            verified all of them. None for the logits of a drafter without a confidence head.
        """


@dataclass(frozen=True)
class ConditionalAcceptance:
    """Blocks drawn from a conditional acceptance per position.

    The acceptance of every single draft varies around its position's mean (a beta distribution), and the confidence
    head knows it exactly.

    Attributes:
        conditional: [gamma] mean probability that a draft is accepted, given that all before it are.
        concentration: the sum of the beta distribution's parameters; the larger, the more alike the drafts are. 4 is as
            wide as what confidence heads report on mixed text; infinity makes all drafts of a position alike.
    """

    conditional: tuple[float, ...]
    concentration: float = 4.0
    name: str = "conditional acceptance"

    def __post_init__(self) -> None:
        if not self.conditional or not all(0 <= rate <= 1 for rate in self.conditional):
            raise ConfigError(
                f"conditional acceptance {list(self.conditional)} must be probabilities, one per draft, e.g. 0.9,0.8"
            )

    @property
    def gamma(self) -> int:
        return len(self.conditional)

    def draw(self, requests: Sequence[int], rng: np.random.Generator) -> tuple[NDArray[np.float64] | None, Ints]:
        means = np.clip(self.conditional, _EDGE, 1 - _EDGE)
        if np.isinf(self.concentration):
            rates = np.tile(means, (len(requests), 1))
        else:
            shape = (len(requests), self.gamma)
            rates = rng.beta(self.concentration * means, self.concentration * (1 - means), size=shape)
            rates = np.clip(rates, _EDGE, 1 - _EDGE)
        accepted = (rng.random(rates.shape) < rates).cumprod(1).sum(1)
        return np.log(rates / (1 - rates)), accepted


class OwnBlocks:
    """Blocks of a source, of which every request has its own series: the n-th one is the same under every policy.

    Drawn from one series for all, the luck of other drafts makes policies that decide alike differ by some percent.

    Args:
        source: where they come from.
    """

    def __init__(self, source: BlockSource) -> None:
        self.gamma, self.name, self._source = source.gamma, source.name, source
        self._ahead: dict[int, Iterator[tuple[NDArray[np.float64] | None, Any]]] = {}

    def draw(self, requests: Sequence[int], rng: np.random.Generator) -> tuple[NDArray[np.float64] | None, Ints]:
        """Take the next block of each of ``requests``, whatever ``rng`` says; see :class:`BlockSource`."""
        blocks = [next(self._ahead.setdefault(request, self._series(request))) for request in requests]
        logits, accepted = zip(*blocks, strict=True)
        return None if logits[0] is None else np.stack(logits), np.array(accepted, dtype=np.int64)

    def _series(self, request: int) -> Iterator[tuple[NDArray[np.float64] | None, Any]]:
        rng = np.random.default_rng((0, request))
        while True:
            logits, accepted = self._source.draw([request] * _BLOCKS_AHEAD, rng)
            yield from zip(repeat(None) if logits is None else logits, accepted)  # noqa: B905 - of which one is endless


@dataclass(frozen=True)
class RecordedBlocks:
    """Blocks that a server really drafted and verified whole, see ``python -m sglang_dspark evaluate --blocks``.

    A request takes the blocks of one recorded answer, at random and again and again, so that easy and hard texts stay
    apart. Which blocks follow each other is lost.

    Attributes:
        accepted: [n] drafts accepted, 0 to gamma.
        logits: [n, gamma] raw logits of the confidence head; None for a drafter without one.
        answer: [n] index of the answer that each block belongs to.
    """

    gamma: int
    accepted: Ints
    logits: NDArray[np.float64] | None
    answer: Ints
    name: str = "recorded blocks"

    @cached_property
    def _by_answer(self) -> list[Ints]:
        return [np.flatnonzero(self.answer == answer) for answer in np.unique(self.answer)]

    def draw(self, requests: Sequence[int], rng: np.random.Generator) -> tuple[NDArray[np.float64] | None, Ints]:
        rows = [self._by_answer[request % len(self._by_answer)] for request in requests]
        chosen = np.array([row[int(rng.integers(len(row)))] for row in rows], dtype=np.int64)
        return None if self.logits is None else self.logits[chosen], self.accepted[chosen]

    def save(self, path: Path) -> None:
        """Write the blocks as JSON, one line per answer."""
        lines = []
        for rows in self._by_answer:
            answer: dict[str, Any] = {"accepted": self.accepted[rows].tolist()}
            if self.logits is not None:
                answer["logits"] = self.logits[rows].round(3).tolist()
            lines.append(json.dumps(answer))
        head = {"format": _FORMAT, "version": FORMAT_VERSION, "gamma": self.gamma, "name": self.name}
        path.write_text("\n".join([json.dumps(head), *lines]) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file of :meth:`save`.

        Raises:
            ConfigError: it is none.
        """
        try:
            return cls._parse(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(f"--blocks {path}: {error!r}; give a file of sglang-dspark evaluate --blocks") from error

    @classmethod
    def _parse(cls, text: str) -> Self:
        head, *answers = (json.loads(line) for line in lines_of(text))
        if (head["format"], head["version"]) != (_FORMAT, FORMAT_VERSION):
            raise ValueError(f"format {head['format']!r}, version {head['version']!r}")
        gamma, accepted = int(head["gamma"]), [count for answer in answers for count in answer["accepted"]]
        logits = [row for answer in answers for row in answer.get("logits", ())]
        sizes_fit = not logits or [len(row) for row in logits] == [gamma] * len(accepted)
        if not accepted or not 0 <= min(accepted) <= max(accepted) <= gamma or not sizes_fit:
            raise ValueError(f"no blocks of {gamma} drafts")
        return cls(
            gamma,
            np.array(accepted, dtype=np.int64),
            np.array(logits, dtype=np.float64) if logits else None,
            np.repeat(np.arange(len(answers)), [len(answer["accepted"]) for answer in answers]),
            str(head["name"]),
        )
