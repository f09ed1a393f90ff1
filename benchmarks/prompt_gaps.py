"""Measure how long streams wait for their next token while long prompts are encoded beside them.

    python benchmarks/prompt_gaps.py --target TARGET --draft DRAFT --output benchmarks/results/prompt_gaps.json

Servers that mix prompts with running requests, and one that does not, take turns: in each round the same streams run on
each of them, and the same prompts arrive one after the other until a stream has ended. A gap is the time between two
messages of a stream. Texts are compared with those of streams without prompts beside them.
"""

from __future__ import annotations

import json
import random
import statistics
import time
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import click

from sglang_dspark.tools import provenance
from sglang_dspark.tools.http_client import open_directly
from sglang_dspark.tools.launch import CPU_ENV, CPU_FLAGS, LaunchedServer, dspark_flags

MIXED = "--enable-mixed-chunk"
STATIC = ("--speculative-dspark-schedule", "static")  # step times that change would change the steps
IDS = range(1000, 20000)  # tokens of the bundled pair's target that are no special ones
STREAM_TOKENS, PROMPT_TOKENS, STREAMS = 48, 1500, 3


@dataclass(frozen=True)
class Stream:
    """A stream that has ended.

    Attributes:
        ids: tokens of its text.
        times: seconds at which its messages came.
    """

    ids: Sequence[int]
    times: Sequence[float]

    def gaps(self, since: float) -> list[float]:
        """Return the seconds between its messages, of those that end after ``since``."""
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False) if later > since]


def body(ids: Sequence[int], max_new_tokens: int, **fields: Any) -> dict[str, Any]:
    """Return the body of a greedy request."""
    parameters = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    return {"input_ids": list(ids), "sampling_params": parameters, **fields}


def stream(url: str, ids: Sequence[int], begun: Event) -> Stream:
    """Run a stream to its end.

    Args:
        begun: set with its first message.
    """
    data = json.dumps(body(ids, STREAM_TOKENS, stream=True)).encode()
    request = urllib.request.Request(f"{url}/generate", data, {"Content-Type": "application/json"})
    times, found = [], []
    with open_directly(request, timeout=600) as response:
        for line in response:
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())
                found = json.loads(line.removeprefix(b"data: "))["output_ids"]
                begun.set()
    return Stream(found, times)


def turn(server: LaunchedServer, draw: random.Random, *, beside: bool) -> dict[str, Any]:
    """Return what becomes of the streams of a round, with prompts beside them or not.

    Args:
        draw: of the round: each server gets the same prompts.
    """
    server.flush_cache()
    begun = [Event() for _ in range(STREAMS)]
    with ThreadPoolExecutor(STREAMS) as pool:
        running = [pool.submit(stream, server.url, draw.choices(IDS, k=24), event) for event in begun]
        for event in begun:
            event.wait(300)
        since, answered = time.perf_counter(), []
        while beside and not any(future.done() for future in running):
            asked = time.perf_counter()
            server.post_json("/generate", body(draw.choices(IDS, k=PROMPT_TOKENS), 1))
            answered.append(time.perf_counter() - asked)
        ended = [future.result() for future in running]
    gaps = [gap for one in ended for gap in one.gaps(since)]
    return {
        "texts": [one.ids for one in ended],
        "largest_gap_s": round(max(gaps), 3),
        "prompts": len(answered),
        "prompt_s": round(statistics.median(answered), 3) if answered else None,
    }


def compared(rounds: Mapping[str, Sequence[Mapping[str, Any]]], alone: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of each configuration; ratios are to the first one, round by round.

    Args:
        rounds: by configuration.
        alone: what the first configuration makes of the same streams without prompts, by round.
    """
    first, found = (
        next(iter(rounds.values())),
        {"without prompts": {"largest_gap_s": [one["largest_gap_s"] for one in alone]}},
    )
    for name, turns in rounds.items():
        ratios = [base["largest_gap_s"] / one["largest_gap_s"] for base, one in zip(first, turns, strict=True)]
        found[name] = {
            **{key: [one[key] for one in turns] for key in ("largest_gap_s", "prompts", "prompt_s")},
            "gap_ratio": round(statistics.geometric_mean(ratios), 2),
            "gap_ratios": [round(ratio, 2) for ratio in ratios],
            "texts_as_without_prompts": all(
                one["texts"] == base["texts"] for one, base in zip(turns, alone, strict=True)
            ),
        }
    return found


@click.command()
@click.option("--target", required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--draft", required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--output", required=True, type=click.Path(path_type=Path))
@click.option("--chunk", default=256, show_default=True, help="Tokens of a chunk of a prompt.")
@click.option("--gap-ms", default=None, type=float, help="Bound on a mixed step, of one more server.")
@click.option("--rounds", default=5, show_default=True)
def main(target: Path, draft: Path, output: Path, chunk: int, gap_ms: float | None, rounds: int) -> None:
    """Measure the largest gaps between tokens of streams beside long prompts."""
    configs = {"prompts first": (), "mixed": (MIXED,)}
    if gap_ms is not None:
        configs[f"mixed, {gap_ms:g} ms"] = (MIXED, "--speculative-dspark-max-gap-ms", str(gap_ms))
    flags = (*CPU_FLAGS, "--dtype", "float32", "--chunked-prefill-size", str(chunk), *dspark_flags(draft), *STATIC)
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(LaunchedServer(target, *flags, *more, env=CPU_ENV))
            for name, more in configs.items()
        }
        plain = next(iter(servers.values()))
        alone = [turn(plain, random.Random(n), beside=False) for n in range(rounds)]
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in servers}
        for n in range(rounds):
            for name in sorted(servers, reverse=bool(n % 2)):  # no server is always the first of a round
                found[name].append(turn(servers[name], random.Random(n), beside=True))
                click.echo(f"{n} {name}: {found[name][-1]['largest_gap_s']} s")
    of = {"streams": STREAMS, "stream_tokens": STREAM_TOKENS, "prompt_tokens": PROMPT_TOKENS, "chunk": chunk}
    provenance.write_json(output, {**of, "configurations": compared(found, alone), **provenance.record()})


if __name__ == "__main__":
    main()
