"""One row of ``sweep.csv``: the schema and how a row is computed from the answers of one round."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np

from serving.client import Reply
from serving.counters import BESIDE, STAT_KEYS, CpuTime
from serving.schedule import Cell


@dataclass(frozen=True)
class SweepRow:
    """One round of one configuration at one load; empty where a figure does not exist. Shares are from 0 to 1."""

    policy: str  # ``plain``, ``builtin`` or a DSPARK policy
    concurrency: int  # users, each with one request at a time
    round: int  # from 0; rounds of equal number and load had equal prompts
    output_tok_s: float  # generated tokens of all users per second, from the first request to the last token
    # Mean over the requests, from sending to the last token. The time to the first token is part of it: a starved HTTP
    # process delivers the first chunks late and all at once, and then a speed counted from the first chunk is a fiction
    # (``1000 / tpot_ms`` is that speed).
    per_user_tok_s: float
    config: str  # label of the configuration
    verify_len: int | None  # drafts verified per request and step, where fixed
    dtype: str  # of the target and the drafter
    position: int  # when the configuration ran among those of its round and load, from 0
    wall_s: float  # length of the round
    ttft_ms: float  # mean time to first token
    tpot_ms: float | None  # mean over the requests of the time per output token after the first
    itl_p50_ms: float | None  # percentiles of the time between chunks of a stream
    itl_p95_ms: float | None
    itl_p99_ms: float | None
    server_cpu_ms_per_tok: float  # CPU time of the server's processes per generated token
    other_cpu_share: float  # share of the machine's cores that other processes used
    accept_length: float | None  # committed tokens per request and decode step, bonus included
    drafted: int | None
    verified: int | None
    accepted: int | None
    committed: int | None  # accepted drafts and bonus tokens
    decode_rounds: int | None  # decode steps, summed over the requests in each
    steps: int | None  # decode steps of the engine
    plain_steps: int | None  # steps in which nothing was drafted, for whatever reason
    num_requests: int
    num_tokens: int
    num_prompt_tokens: int
    timestamp: str  # end of the round, UTC
    in_flight: float  # requests that were in the server, averaged over the round
    per_user_tok_s_p5: float  # 5th percentile of the requests' speeds: 95 % were served faster
    ttft_p50_ms: float  # percentiles over the requests
    ttft_p95_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float | None
    tpot_p95_ms: float | None
    tpot_p99_ms: float | None
    mean_verify_len: float | None  # drafts verified per request and step
    wasted_share: float | None  # share of the verified drafts that were rejected
    plain_share: float | None  # share of the steps in which nothing was drafted
    parked_steps: int | None  # steps while speculation rested because non-speculative steps are faster
    parked_share: float | None
    decode_tok_s: float | None  # generated tokens of all users per second, while all of them decode
    prompts_beside: int | None  # verified next to drafts


COLUMNS = tuple(field.name for field in fields(SweepRow))


def make_row(
    cell: Cell,
    replies: Sequence[Reply],
    cpu_time: CpuTime,
    counts: Mapping[str, int] | None = None,
    accept_length: float | None = None,
) -> SweepRow:
    """Summarise one round of at least one answer.

    Args:
        cpu_time: used during the round.
        counts: change of the server's counters by column; None for a server without DSPARK.
        accept_length: as SGLang's own algorithms report it; None if they do not.
    """
    wall_s = max(reply.done_s for reply in replies) - min(reply.sent_s for reply in replies)
    num_tokens = sum(reply.num_tokens for reply in replies)
    speeds = [reply.num_tokens / reply.total_s for reply in replies]
    tpots_ms = [1e3 * reply.tpot_s for reply in replies if reply.tpot_s is not None]
    ttfts_ms = [1e3 * reply.ttft_s for reply in replies]
    configuration = cell.configuration
    return SweepRow(
        policy=configuration.policy,
        concurrency=cell.users,
        round=cell.round,
        output_tok_s=num_tokens / wall_s,
        per_user_tok_s=fmean(speeds),
        per_user_tok_s_p5=float(np.percentile(speeds, 5)),
        in_flight=sum(reply.total_s for reply in replies) / wall_s,
        config=configuration.label,
        verify_len=configuration.verify_len,
        dtype=configuration.dtype,
        position=cell.position,
        wall_s=wall_s,
        ttft_ms=fmean(ttfts_ms),
        tpot_ms=fmean(tpots_ms) if tpots_ms else None,
        **_percentiles("ttft", ttfts_ms),
        **_percentiles("tpot", tpots_ms),
        **_percentiles("itl", [1e3 * gap for reply in replies for gap in reply.gaps_s]),
        server_cpu_ms_per_tok=1e3 * cpu_time.server_s / num_tokens,
        other_cpu_share=cpu_time.others_s / wall_s / (os.cpu_count() or 1),
        **_speculation(counts, accept_length),
        num_requests=len(replies),
        num_tokens=num_tokens,
        num_prompt_tokens=sum(reply.num_prompt_tokens for reply in replies),
        decode_tok_s=decode_speed(replies, cell.users),
        timestamp=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def decode_speed(replies: Sequence[Reply], users: int) -> float | None:
    """Return the tokens per second of all users while each is between the first and the last token of an answer.

    No prompt is encoded or waits in these times, so they show what decode steps take. None without any, or if the
    server does not tell the tokens of its chunks.
    """
    changes = sorted(change for reply in replies if reply.tokens for change in _ends(reply))
    edges, decoding, seconds = [], 0, 0.0
    for (moment, change), (until, _) in pairwise(changes):
        decoding += change
        if decoding == users and until > moment:
            edges += [moment, until]
            seconds += until - moment
    if not edges:
        return None
    moments = np.array([moment for reply in replies for moment in reply.chunks_s[1:]])
    numbers = np.array([number for reply in replies for number in np.diff(reply.tokens)])
    return float(numbers[np.searchsorted(edges, moments) % 2 == 1].sum() / seconds)


def _ends(reply: Reply) -> tuple[tuple[float, int], tuple[float, int]]:
    """Return when a request begins and ends to decode, with the change in the number of those that do."""
    return (reply.chunks_s[0], 1), (reply.done_s, -1)


def _percentiles(name: str, values: Sequence[float]) -> dict[str, float | None]:
    at = (50, 95, 99)
    found = np.percentile(values, at).tolist() if len(values) else [None] * len(at)
    return {f"{name}_p{share}_ms": value for share, value in zip(at, found, strict=True)}


def _speculation(counts: Mapping[str, int] | None, accept_length: float | None) -> dict[str, Any]:
    if counts is None:
        derived = ("mean_verify_len", "wasted_share", "plain_share", "parked_share")
        return {**dict.fromkeys((*STAT_KEYS, BESIDE, *derived)), "accept_length": accept_length}
    rounds, verified, steps = counts["decode_rounds"], counts["verified"], counts["steps"]
    return {
        **counts,
        "parked_share": counts["parked_steps"] / steps if steps else None,
        "accept_length": counts["committed"] / rounds if rounds else None,
        "mean_verify_len": verified / rounds if rounds else None,
        "wasted_share": 1 - counts["accepted"] / verified if verified else None,
        "plain_share": counts["plain_steps"] / steps if steps else None,
    }
