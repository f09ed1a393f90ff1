"""Cut simulated prompts into chunks, and lay them out beside the requests that run."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from sglang_dspark.config import DSparkConfig
from sglang_dspark.errors import ConfigError
from sglang_dspark.scheduling.policies import Beside
from sglang_dspark.scheduling.prompts import ChunkLimit, verified_sooner
from sglang_dspark.scheduling.sps_table import SpsTable
from sglang_dspark.tools.simulator.workload import Request

CHUNK_TOKENS = 8192
"""Tokens of a chunk, as SGLang has them on an H200."""


class Piece(NamedTuple):
    """The tokens of a prompt that a step reads: ``tokens`` of them, behind ``context`` tokens."""

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
        mixed: whether running requests get tokens beside prompts, as with ``--enable-mixed-chunk``.

    Attributes:
        limit: of a chunk's rows beside requests that run; None without a bound on gaps.
    """

    def __init__(self, table: SpsTable, options: DSparkConfig, *, mixed: bool) -> None:
        if options.max_gap_ms is not None and not mixed:
            raise ConfigError(
                f"--max-gap-ms {options.max_gap_ms:g} cuts chunks that running requests have a row of; pass "
                "--mixed-chunk, or drop it"
            )
        self.mixed = mixed
        self.limit = None if options.max_gap_ms is None else ChunkLimit(options.max_gap_ms)
        self._width = table.gamma + 1
        self._table, self._asked, self._bound_ms = table, options.prompt_rows, options.max_gap_ms or inf

    def next_chunk(self, waiting: deque[Request], running: int) -> Chunk | None:
        """Take the next chunk from the prompts that wait, beside so many requests; None without any."""
        left = CHUNK_TOKENS
        if self.mixed and running:
            left = max(CHUNK_TOKENS if self.limit is None else self.limit.beside(running), running + 1) - running
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

    def verified(self, chunk: Chunk, running: int = 0) -> Beside | None:
        """Return how a chunk is verified, beside so many requests; None if it is prefilled."""
        table, rows = self._table, chunk.tokens
        requests = sum(-(-piece.tokens // self._width) for piece in chunk.pieces)
        if table.tiers and (requests + running > table.requests[-1] or rows + running * self._width > table.tiers[-1]):
            return None
        context = chunk.attended / rows
        if self._asked is not None:
            verified = rows <= self._asked
        else:  # a CPU has to be asked
            verified = bool(table.tiers) and verified_sooner(table, requests, rows, context)
        return Beside(requests, rows, context, self._bound_ms) if verified else None
