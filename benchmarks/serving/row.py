"""One row of ``sweep.csv``: the schema and how a row is computed from the answers of one round."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import Any, Self

import numpy as np

from serving.client import Reply
from serving.cpu_time import CpuTime
from serving.schedule import Cell

STAT_KEYS = {
    "drafted": "drafted_tokens",
    "verified": "verified_tokens",
    "accepted": "accepted_tokens",
    "committed": "committed_tokens",
    "decode_rounds": "rounds",
    "steps": "steps",
    "plain_steps": "plain_steps",
}
"""Column -> counter of ``GET /dspark/stats``."""


@dataclass(frozen=True)
class Origin:
    """Where the rows of a sweep come from; the same in every row, so that rows of several sweeps can be told apart.

    Attributes:
        prompt_set: name of the prompt file.
        model: name of the target.
        draft: name of the drafter; empty without one.
        commit: git commit of this repository, ``-dirty`` when the tree differed from it.
        versions: ``name=version`` of what was measured, separated by spaces.
        cpu: model and number of cores.
        gpu: model; empty without one.
    """

    prompt_set: str
    model: str
    draft: str
    commit: str
    versions: str
    cpu: str
    gpu: str


@dataclass(frozen=True)
class SweepRow:
    """One round of one configuration at one concurrency. Empty where a figure does not exist.

    Attributes:
        policy: ``plain`` or a DSPARK schedule.
        concurrency: users, each with one request at a time.
        round: counted from 0; rounds of equal number had equal prompts.
        output_tok_s: generated tokens of all users per second of the round.
        per_user_tok_s: mean over the requests of tokens per second from sending to the last token. The time to the
            first token is part of it: a starved HTTP process delivers the first chunks late and all at once, and then a
            speed counted from the first chunk is a fiction (``1000 / tpot_ms`` is that speed).
        config: label of the configuration.
        verify_len: drafts verified per request and step, where fixed.
        dtype: of the target and the drafter.
        position: when the configuration ran among those of its round and concurrency, from 0.
        wall_s: length of the round.
        ttft_ms: mean time to first token.
        tpot_ms: mean over the requests of the time per output token after the first.
        itl_p50_ms, itl_p95_ms, itl_p99_ms: percentiles of the time between chunks of a stream.
        server_cpu_ms_per_tok: CPU time of the server's processes per generated token.
        other_cpu_share: share of the machine's cores that other processes used during the round, 0 to 1.
        accept_length: committed tokens per request and decode step, bonus included.
        drafted, verified, accepted, committed: draft tokens during the round; committed counts the bonus as well.
        decode_rounds: decode steps, summed over the requests in each.
        steps: decode steps of the engine; plain_steps: those of them in which nothing was drafted.
        num_requests, num_tokens, num_prompt_tokens: what the round consisted of.
        prompt_set, model, draft, commit, versions, cpu, gpu: see :class:`Origin`.
        timestamp: end of the round, UTC.
    """

    policy: str
    concurrency: int
    round: int
    output_tok_s: float
    per_user_tok_s: float
    config: str
    verify_len: int | None
    dtype: str
    position: int
    wall_s: float
    ttft_ms: float
    tpot_ms: float | None
    itl_p50_ms: float | None
    itl_p95_ms: float | None
    itl_p99_ms: float | None
    server_cpu_ms_per_tok: float
    other_cpu_share: float
    accept_length: float | None
    drafted: int | None
    verified: int | None
    accepted: int | None
    committed: int | None
    decode_rounds: int | None
    steps: int | None
    plain_steps: int | None
    num_requests: int
    num_tokens: int
    num_prompt_tokens: int
    prompt_set: str
    model: str
    draft: str
    commit: str
    versions: str
    cpu: str
    gpu: str
    timestamp: str


COLUMNS = tuple(field.name for field in fields(SweepRow))


def make_row(
    cell: Cell, replies: Sequence[Reply], cpu_time: CpuTime, stats: Mapping[str, int] | None, origin: Origin
) -> SweepRow:
    """Summarise one round.

    Args:
        cell: what was measured.
        replies: all answers of the round, at least one.
        cpu_time: used during the round.
        stats: change of the server's counters during the round, by column; None for a server without DSPARK.
        origin: where the sweep ran.
    """
    wall_s = max(reply.done_s for reply in replies) - min(reply.sent_s for reply in replies)
    num_tokens = sum(reply.num_tokens for reply in replies)
    tpots_s = [reply.tpot_s for reply in replies if reply.tpot_s is not None]
    gaps_ms = [1e3 * gap for reply in replies for gap in reply.gaps_s]
    p50, p95, p99 = np.percentile(gaps_ms, [50, 95, 99]).tolist() if gaps_ms else [None] * 3
    configuration = cell.configuration
    return SweepRow(
        policy=configuration.policy,
        concurrency=cell.concurrency,
        round=cell.round,
        output_tok_s=num_tokens / wall_s,
        per_user_tok_s=fmean(reply.num_tokens / (reply.done_s - reply.sent_s) for reply in replies),
        config=configuration.label,
        verify_len=configuration.verify_len,
        dtype=configuration.dtype,
        position=cell.position,
        wall_s=wall_s,
        ttft_ms=1e3 * fmean(reply.ttft_s for reply in replies),
        tpot_ms=1e3 * fmean(tpots_s) if tpots_s else None,
        itl_p50_ms=p50,
        itl_p95_ms=p95,
        itl_p99_ms=p99,
        server_cpu_ms_per_tok=1e3 * cpu_time.server_s / num_tokens,
        other_cpu_share=cpu_time.others_s / wall_s / (os.cpu_count() or 1),
        accept_length=stats["committed"] / stats["decode_rounds"] if stats and stats["decode_rounds"] else None,
        **(stats or dict.fromkeys(STAT_KEYS)),
        num_requests=len(replies),
        num_tokens=num_tokens,
        num_prompt_tokens=sum(reply.num_prompt_tokens for reply in replies),
        **asdict(origin),
        timestamp=datetime.now(UTC).isoformat(timespec="seconds"),
    )


class RowWriter:
    """Writes ``sweep.csv`` row by row, so that a sweep that is cut short keeps what it measured."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", newline="", encoding="utf-8")
        self._writer = csv.DictWriter(self._file, COLUMNS, lineterminator="\n")
        self._writer.writeheader()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, row: SweepRow) -> None:
        """Append ``row`` and hand it to the operating system."""
        self._writer.writerow({name: _text(value) for name, value in asdict(row).items()})
        self._file.flush()


def _text(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value
