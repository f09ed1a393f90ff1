r"""Which policy decodes fastest? One server, and policies that take turns of a few seconds on the same texts.

    python benchmarks/policy_turns.py --target TARGET --draft DRAFT --prompts FILE --output RESULTS \
        --config auto --config static:3 --config static:5 --concurrency 1,4,16 --rounds 20
    python benchmarks/paired_ratio.py RESULTS/turns.csv --metric decode_tok_s --against-best auto@bfloat16

A machine that others use too changes its speed by tens of percent within a minute, which is as long as a round of
``sweep_concurrency.py`` takes all configurations. Here a turn is a second or two, and what policies do alike is left
out: every turn of a round decodes the same number of tokens of the same texts, prompts are in the prefix cache, and the
clock runs while all users are being served, so there is no tail of the last answers. Steps that verify differently and
nothing else make the difference. For what a user sees, prefill and all, and against a plain server, there is
``sweep_concurrency.py``.

RESULTS, a new folder, gets ``turns.csv``, one row per policy, load and round, and ``provenance.json``.
"""

from __future__ import annotations

import asyncio
import csv
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import click
from paired_ratio import ratio_table, ratios_to_the_best, summarise
from rich.console import Console
from serving.client import Sampling, request_body
from serving.configurations import Configuration, parse_configurations
from serving.load import user_counts
from serving.prompts import Prompt, load_mixed_prompts
from serving.results import read_sweep

from sglang_dspark import provenance
from sglang_dspark.errors import ConfigError, DSparkError
from sglang_dspark.launch import CPU_ENV, CPU_FLAGS, LaunchedServer, dspark_flags

COUNTERS = ("committed_tokens", "rounds", "verified_tokens", "accepted_tokens", "steps", "plain_steps", "parked_steps")
LEAD_IN_TOKENS = 8  # of each user, until all are being served
HEADROOM = 4  # times the tokens of a turn that an answer may have: users do not advance alike, and none shall end
POLL_S = 0.01  # a turn's end is found out so soon
SEED = 0


class Turns:
    """A server, and users who ask it what they are told.

    Args:
        prompts: taken in turn; each round begins with another one.
        tokens: that a turn decodes for each user, in the mean over the users; those of the lead-in not included.
        raw: whether prompts are sent as they are, without the chat template.
    """

    def __init__(self, server: LaunchedServer, prompts: Sequence[Prompt], tokens: int, *, raw: bool) -> None:
        self._server, self._prompts, self._tokens = server, prompts, tokens
        most = HEADROOM * (LEAD_IN_TOKENS + tokens)
        self._sampling = Sampling(most, temperature=0.0, ignore_eos=True, raw=raw)

    async def run(self, configurations: Sequence[Configuration], users: int, num_rounds: int) -> list[dict[str, Any]]:
        """One row per configuration and round; a first round is not among them."""
        order, rows = random.Random(SEED), []
        timeout, connector = aiohttp.ClientTimeout(total=600), aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(self._server.url, timeout=timeout, connector=connector) as session:
            await asyncio.gather(*(self._ask(session, prompt, max_tokens=1) for prompt in self._prompts))
            for number in range(-1, num_rounds):
                asked = [self._prompts[(number * users + user) % len(self._prompts)] for user in range(users)]
                for position, configuration in enumerate(order.sample(configurations, len(configurations))):
                    await self._json(session, "/dspark/policy", configuration.policy_fields)
                    turn = await self._turn(session, asked)
                    if number >= 0:
                        rows.append(self._row(configuration, users, number, position, turn))
        return rows

    async def _turn(self, session: aiohttp.ClientSession, prompts: Sequence[Prompt]) -> dict[str, float]:
        """Change of the counters, and ``seconds``, while ``prompts`` are answered as far as a turn goes."""
        idle = await self._json(session, "/dspark/stats")
        async with asyncio.TaskGroup() as group:
            for prompt in prompts:
                group.create_task(self._ask(session, prompt))
            before, started = await self._progress(session, idle, len(prompts) * LEAD_IN_TOKENS)
            after, ended = await self._progress(session, before, len(prompts) * self._tokens)
            await self._json(session, "/abort_request", {"rid": "", "abort_all": True})
        return {name: after[name] - before[name] for name in COUNTERS} | {"seconds": ended - started}

    async def _progress(
        self, session: aiohttp.ClientSession, since: dict[str, Any], tokens: int
    ) -> tuple[dict[str, Any], float]:
        """Statistics, and the time, when so many more tokens are committed. Asks seldom: each question costs time."""
        started = time.perf_counter()
        while True:
            stats, now = await self._json(session, "/dspark/stats"), time.perf_counter()
            done = stats["committed_tokens"] - since["committed_tokens"]
            if done >= tokens:
                return stats, now
            await asyncio.sleep(max(POLL_S, 0.9 * (now - started) * (tokens - done) / max(done, 1)) if done else POLL_S)

    async def _ask(self, session: aiohttp.ClientSession, prompt: Prompt, max_tokens: int | None = None) -> None:
        sampling = self._sampling if max_tokens is None else replace(self._sampling, max_tokens=max_tokens)
        body = request_body(prompt, sampling) | {"stream": False, "stream_options": None}
        await self._json(session, sampling.path, body)

    async def _json(self, session: aiohttp.ClientSession, path: str, body: Any = None) -> Any:
        async with session.get(path) if body is None else session.post(path, json=body) as response:
            if response.status != 200:
                raise DSparkError(f"{response.url}: HTTP {response.status}: {(await response.text())[:500]}")
            content = await response.read()
        return json.loads(content) if content else None

    @staticmethod
    def _row(
        configuration: Configuration, users: int, number: int, position: int, turn: dict[str, float]
    ) -> dict[str, Any]:
        return {
            "config": configuration.label,
            "policy": configuration.policy,
            "dtype": configuration.dtype,
            "concurrency": users,
            "round": number,
            "position": position,
            "decode_tok_s": turn["committed_tokens"] / turn["seconds"],
            "ms_per_step": 1e3 * turn["seconds"] / turn["steps"],
            "accept_length": turn["committed_tokens"] / turn["rounds"],
            "mean_verify_len": turn["verified_tokens"] / turn["rounds"],
            **turn,
        }


def _append(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Load by load, so that a run that is cut short keeps what it measured."""
    is_new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        if is_new:
            writer.writeheader()
        for row in rows:
            writer.writerow(
                {name: f"{value:.6g}" if isinstance(value, float) else value for name, value in row.items()}
            )


def _policies(texts: Sequence[str], dtype: str) -> list[Configuration]:
    configurations = parse_configurations(texts, (), dtype)
    for configuration in configurations:
        if not configuration.is_dspark or configuration.extra_flags or configuration.dtype != dtype:
            raise ConfigError(
                f"--config {configuration.label}: all policies share one server here; name policies of DSPARK only, "
                "and give --dtype and --server-flags once for all"
            )
    return configurations


@click.command(help=__doc__)
@click.option("--target", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--draft", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--prompts", "files", type=click.Path(path_type=Path), multiple=True, required=True)
@click.option("--config", "configs", multiple=True, required=True, help="A policy, as in sweep_concurrency.py.")
@click.option("--concurrency", default="1,4,16", show_default=True, callback=user_counts, help="Numbers of users.")
@click.option("--rounds", default=20, show_default=True, type=click.IntRange(1))
@click.option("--tokens", default=48, show_default=True, type=click.IntRange(1), help="Of a turn, for each user.")
@click.option("--num-prompts", default=48, show_default=True, type=click.IntRange(1))
@click.option("--raw-prompts", is_flag=True, help="Send the text as it is, without the chat template.")
@click.option("--dtype", default="bfloat16", show_default=True)
@click.option("--device", default="cpu", show_default=True, type=click.Choice(["cpu", "cuda"]))
@click.option("--server-flags", default="", help="Further arguments of the server, as one text.")
@click.option("--output", required=True, type=click.Path(file_okay=False, path_type=Path), help="Folder for results.")
def main(**options: Any) -> None:
    """Command line; see the module."""
    console, output = Console(width=None if sys.stdout.isatty() else 160, markup=False, emoji=False), options["output"]
    try:
        configurations = _policies(options["configs"], options["dtype"])
        prompts = load_mixed_prompts(options["files"])[: options["num_prompts"]]
        record = provenance.record() | {
            "prompts": [{"file": path.name, "sha256": provenance.file_digest(path)} for path in options["files"]]
        }
        if (output / "turns.csv").exists():
            raise ConfigError(f"--output {output} holds turns already; name another folder")
        output.mkdir(parents=True, exist_ok=True)
        provenance.write_json(output / "provenance.json", record)
        flags = [*dspark_flags(options["draft"]), "--dtype", options["dtype"], *options["server_flags"].split()]
        device_flags, env = (CPU_FLAGS, CPU_ENV) if options["device"] == "cpu" else ((), None)
        with LaunchedServer(options["target"], *device_flags, *flags, env=env) as server:
            turns = Turns(server, prompts, options["tokens"], raw=options["raw_prompts"])
            for users in options["concurrency"]:
                rows = asyncio.run(turns.run(configurations, users, options["rounds"]))
                _append(output / "turns.csv", rows)
                console.print(f"{users} users measured", highlight=False)
        frame = read_sweep(output / "turns.csv")
    except DSparkError as error:
        raise click.ClickException(str(error)) from error
    if len(configurations) > 1:
        pairs = ratios_to_the_best(frame, "decode_tok_s", configurations[0].label)
        console.print(ratio_table(summarise(pairs), "decode_tok_s"))


if __name__ == "__main__":
    main()
