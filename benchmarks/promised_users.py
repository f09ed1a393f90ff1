"""Measure promises kept beside long prompts: half of the users are promised a time per token, and prompts arrive.

    python benchmarks/promised_users.py --target TARGET --draft DRAFT --prompts PROMPTS --output OUTPUT

Three ways take turns at the same prompts: ``auto`` as it comes, ``auto`` with promises, and with prompts beside drafts
and a bound on gaps, too. What is promised is a share of the mean time per token that users have by the first way in a
round before those that count. The answers of all are judged by it, on the clients' clocks.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import click
import numpy as np
from paired_ratio import spread_of
from serving.client import Reply, Sampling, ask_all
from serving.prompts import Prompt, load_mixed_prompts, round_prompts

from sglang_dspark.tools import provenance
from sglang_dspark.tools.launch import CPU_ENV, CPU_FLAGS, LaunchedServer, dspark_flags

USERS, ANSWERS, MAX_TOKENS = 8, 3, 64
LONG_TOKENS, LONG_EVERY_S = 1000, 8.0
IDS = range(1000, 20000)  # tokens of the bundled pair's target that are no special ones
BESIDE = ("--speculative-dspark-prompt-rows", "512")  # a CPU has to be asked
FIRST, PROMISED, MIXED_TOO = "auto", "auto, promised", "auto, promised, beside"


def long_prompts(server: LaunchedServer, draw: random.Random, over: Event) -> int:
    """Send a long prompt now and then until ``over`` is set; return how many were answered."""
    sent = 0
    while not over.wait(LONG_EVERY_S):
        body = {
            "input_ids": draw.choices(IDS, k=LONG_TOKENS),
            "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        }
        server.post_json("/generate", body)
        sent += 1
    return sent


def turn(
    server: LaunchedServer, prompts: Sequence[Prompt], seed: int, fields: dict[str, Any]
) -> tuple[list[Reply], list[Reply], dict[str, Any]]:
    """Return the answers to users with a promise, those to users without, and what the turn was like.

    Args:
        prompts: the first half is that of users with a promise.
        fields: of the requests of users with a promise.
    """
    server.flush_cache()
    half, over, sampling = len(prompts) // 2, Event(), Sampling(MAX_TOKENS, 0.0, ignore_eos=True)
    with_promise = [replace(prompt, fields=fields) for prompt in prompts[:half]]
    began = time.perf_counter()
    with ThreadPoolExecutor(3) as pool:
        prompts_sent = pool.submit(long_prompts, server, random.Random(seed), over)
        asked = [
            pool.submit(ask_all, server.url, part, sampling, USERS // 2) for part in (with_promise, prompts[half:])
        ]
        try:
            promised, others = (future.result() for future in asked)
        finally:
            over.set()
        wall_s = time.perf_counter() - began
    replies = promised + others
    gaps_ms = [1e3 * gap for reply in replies for gap in reply.gaps_s]
    figures = {
        "tok_s": sum(reply.num_tokens for reply in replies) / wall_s,
        "gap_p50_ms": float(np.percentile(gaps_ms, 50)),
        "gap_p99_ms": float(np.percentile(gaps_ms, 99)),
        "wall_s": wall_s,
        "long_prompts": prompts_sent.result(),
    }
    return promised, others, figures


def mean_ms(replies: Sequence[Reply]) -> float:
    """Return the mean milliseconds per token behind the first."""
    return float(np.mean([1e3 * reply.tpot_s for reply in replies if reply.tpot_s]))


def compared(rounds: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the mean attainment of each way, and ratios of the others to the first by round."""
    names = ("tok_s", "gap_p50_ms", "gap_p99_ms", "promised_ms_per_token", "others_ms_per_token")
    found = {}
    for way, turns in rounds.items():
        pairs = list(zip(rounds[FIRST], turns, strict=True))
        ratios = {name: spread_of([one[name] / base[name] for base, one in pairs]) for name in names}
        found[way] = {"attainment": round(float(np.mean([one["kept"] for one in turns])), 3)}
        found[way] |= {} if way == FIRST else {"ratios": ratios}
    return found


@click.command()
@click.option("--target", required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--draft", required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--prompts", required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--output", required=True, type=click.Path(path_type=Path))
@click.option("--share", default=0.8, show_default=True, help="What is promised, of the mean time per token.")
@click.option("--gap-ms", default=500.0, show_default=True, help="Bound on a mixed step.")
@click.option("--minutes", default=20.0, show_default=True)
def main(target: Path, draft: Path, prompts: Path, output: Path, share: float, gap_ms: float, minutes: float) -> None:
    """Measure promises beside long prompts."""
    flags, asked = (*CPU_FLAGS, *dspark_flags(draft)), load_mixed_prompts([prompts])
    with ExitStack() as stack:
        plain, mixed = (
            stack.enter_context(LaunchedServer(target, *flags, *more, env=CPU_ENV))
            for more in ((), ("--enable-mixed-chunk", *BESIDE, "--speculative-dspark-max-gap-ms", str(gap_ms)))
        )
        servers = {FIRST: plain, PROMISED: plain, MIXED_TOO: mixed}
        for server in (plain, mixed, mixed, plain):  # step times settle
            promised, others, _ = turn(server, round_prompts(asked, -1, USERS * ANSWERS), 0, {})
        promised_ms = share * mean_ms(promised + others)
        click.echo(f"promised: {promised_ms:.0f} ms per token")
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in servers}
        end, number, names = time.monotonic() + 60 * minutes, 0, list(servers)
        while time.monotonic() < end:
            for name in names[number % 3 :] + names[: number % 3]:  # none is always the first of a round
                fields = {} if name == FIRST else {"speculation": {"tpot_ms": promised_ms}}
                part = round_prompts(asked, number, USERS * ANSWERS)
                promised, others, figures = turn(servers[name], part, number, fields)
                kept = float(np.mean([1e3 * reply.tpot_s <= promised_ms for reply in promised if reply.tpot_s]))
                of = {"promised_ms_per_token": mean_ms(promised), "others_ms_per_token": mean_ms(others)}
                found[name].append({key: round(value, 3) for key, value in ({"kept": kept} | of | figures).items()})
                click.echo(f"{number} {name}: {found[name][-1]}")
            number += 1
            record = {"promised_ms": round(promised_ms, 1), "ways": compared(found), "rounds": found}
            provenance.write_json(output, record | provenance.record())


if __name__ == "__main__":
    main()
