r"""Compare policies on one server, where they take turns of a few steps while it decodes.

    python benchmarks/policy_turns.py --target TARGET --draft DRAFT --prompts FILE --output RESULTS \
        --config auto --config static:3 --config static:5 --concurrency 1,4,16 --rounds 20
    python benchmarks/paired_ratio.py RESULTS/turns.csv --metric decode_tok_s --of auto@bfloat16

A machine that others use too changes its speed by ten percent from one second to the next, and some texts are easier to
draft than others. Against the one, a turn is a fraction of a second: policies are switched while requests are being
decoded, and the server says with every switch what it has counted until then. Against the other, a round decodes the
same texts as often as there are policies, which change places every time, so that each has its turn at every part of
the texts. Prompts are in the prefix cache, and nothing is counted before all users are being served or after the first
answer has ended. What is left are steps that verify differently. Batches of prompts do not overlap, and paired_ratio.py
makes intervals of batches, not of rounds, so that they hold for other texts as well. For what a user sees, prefill and
all, and against a plain server, there is ``sweep_concurrency.py``.

The server runs without overlap scheduling, so that a step is counted before the next one is chosen.

RESULTS, a new folder, gets ``turns.csv``, one row per policy, load and round, and ``provenance.json``.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import click
from paired_ratio import ratio_table, ratios_to_each, summarise
from rich.console import Console
from serving.client import Sampling, request_body
from serving.configurations import Configuration, parse_configurations
from serving.output import append_row
from serving.prompts import Prompt, load_mixed_prompts
from serving.results import read_sweep
from serving.schedule import USERS

from sglang_dspark.errors import ConfigError, DSparkError
from sglang_dspark.tools import provenance
from sglang_dspark.tools.launch import CPU_ENV, CPU_FLAGS, LaunchedServer, dspark_flags

COUNTERS = ("committed_tokens", "rounds", "verified_tokens", "accepted_tokens", "steps", "plain_steps", "parked_steps")
COUNTED = ("uptime_s", *COUNTERS)
NO_OVERLAP = "--disable-overlap-schedule"
LEAD_IN_TOKENS = 3  # of each user in the mean, until all are being served
POLL_S = 0.05
SEED = 0


class Turns:
    """A server, and simulated users that send it the given prompts.

    Args:
        prompts: shuffled and divided into batches, one prompt per user; each round decodes the next batch, and when all
            have been decoded, the first one again.
        seconds: of a turn.
        cycles: turns that each policy has while the same answers are being decoded.
        sampling: how all prompts are asked; answers have to last for all turns.
    """

    def __init__(
        self, server: LaunchedServer, prompts: Sequence[Prompt], seconds: float, cycles: int, sampling: Sampling
    ) -> None:
        self._server, self._prompts, self._sampling = server, prompts, sampling
        self._seconds, self._cycles = seconds, cycles

    async def run(self, configurations: Sequence[Configuration], users: int, num_rounds: int) -> list[dict[str, Any]]:
        """Return one row per configuration and round; what comes before the first round is not counted."""
        shuffle, rows = random.Random(SEED), []
        timeout, connector = aiohttp.ClientTimeout(total=600), aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(self._server.url, timeout=timeout, connector=connector) as session:
            batches = prompt_batches(self._prompts, users)
            await self._prefill(session, batches[-1])
            await self._decode(session, batches[-1], configurations, _nothing(configurations))
            for number in range(num_rounds):
                batch = number % len(batches)
                prompts = batches[batch]
                await self._prefill(session, prompts)
                order = shuffle.sample(configurations, len(configurations))
                sums = _nothing(order)
                for shift in range(len(order)):
                    await self._decode(session, prompts, order[shift:] + order[:shift], sums)
                rows += [self._row(each, users, number, batch, sums[each.label]) for each in configurations]
                if any(counts["rounds"] != users * counts["steps"] for counts in sums.values()):
                    raise DSparkError(f"the server did not decode for all {users} users at a time; ask for fewer")
        return rows

    async def _prefill(self, session: aiohttp.ClientSession, prompts: Sequence[Prompt]) -> None:
        """Put prompts into the prefix cache."""
        await asyncio.gather(*(self._ask(session, prompt, max_tokens=1) for prompt in prompts))

    async def _decode(
        self,
        session: aiohttp.ClientSession,
        prompts: Sequence[Prompt],
        order: Sequence[Configuration],
        sums: dict[str, dict[str, float]],
    ) -> None:
        """Decode answers to ``prompts``, policies taking turns in this order, and add what they did to ``sums``."""
        try:
            async with asyncio.TaskGroup() as group:
                begun = await self._switch(session, order[0])
                answers = [group.create_task(self._ask(session, prompt)) for prompt in prompts]
                while (await self._tokens(session)) - begun["committed_tokens"] < LEAD_IN_TOKENS * len(prompts):
                    self._check_that_none_ended(answers)
                    await asyncio.sleep(POLL_S)
                await self._take_turns(session, list(order) * self._cycles, sums)
                self._check_that_none_ended(answers)
                await self._json(session, "/abort_request", {"rid": "", "abort_all": True})
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures

    @staticmethod
    def _check_that_none_ended(answers: Sequence[asyncio.Task[None]]) -> None:
        if any(answer.done() for answer in answers):
            raise DSparkError("an answer ended before all policies had had their turns; raise --max-tokens")

    async def _take_turns(
        self, session: aiohttp.ClientSession, turns: Sequence[Configuration], sums: dict[str, dict[str, float]]
    ) -> None:
        before = await self._switch(session, turns[0])
        for turn, following in zip(turns, [*turns[1:], turns[0]], strict=True):
            await asyncio.sleep(self._seconds)
            after = await self._switch(session, following)
            for name in COUNTED:
                sums[turn.label][name] += after[name] - before[name]
            before = after

    async def _switch(self, session: aiohttp.ClientSession, configuration: Configuration) -> dict[str, float]:
        """Return the server's counts up to the switch."""
        answer = await self._json(session, "/dspark/policy", configuration.policy_fields)
        return dict(answer["until_now"])

    async def _tokens(self, session: aiohttp.ClientSession) -> int:
        return int((await self._json(session, "/dspark/stats"))["committed_tokens"])

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
        configuration: Configuration, users: int, number: int, batch: int, counts: dict[str, float]
    ) -> dict[str, Any]:
        return {
            "config": configuration.label,
            "policy": configuration.policy,
            "dtype": configuration.dtype,
            "concurrency": users,
            "round": number,
            "batch": batch,
            "decode_tok_s": counts["committed_tokens"] / counts["uptime_s"],
            "ms_per_step": 1e3 * counts["uptime_s"] / counts["steps"],
            "accept_length": counts["committed_tokens"] / counts["rounds"],
            "mean_verify_len": counts["verified_tokens"] / counts["rounds"],
            "seconds": counts["uptime_s"],
            **{name: round(counts[name]) for name in COUNTERS},
        }


def prompt_batches(prompts: Sequence[Prompt], users: int) -> list[list[Prompt]]:
    """Return disjoint batches of one prompt per user, shuffled; what does not fill a batch is left out.

    Rounds of the same batch repeat its texts, so they are no new evidence about texts: intervals are made of batches.

    Raises:
        ConfigError: there are fewer prompts than users.
    """
    if len(prompts) < users:
        raise ConfigError(f"--concurrency {users} needs as many prompts, found {len(prompts)}; raise --num-prompts")
    shuffled = random.Random(SEED).sample(prompts, len(prompts))
    return [shuffled[start : start + users] for start in range(0, len(prompts) - users + 1, users)]


def _nothing(configurations: Sequence[Configuration]) -> dict[str, dict[str, float]]:
    """Return the sums of what the server counts, by label, before anything was counted."""
    return {configuration.label: dict.fromkeys(COUNTED, 0.0) for configuration in configurations}


def _policies(texts: Sequence[str], dtype: str) -> list[Configuration]:
    configurations = parse_configurations(texts, dtype)
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
@click.option("--concurrency", default="1,4,16", show_default=True, type=USERS, help="Numbers of users.")
@click.option("--rounds", default=20, show_default=True, type=click.IntRange(1))
@click.option("--seconds", default=0.2, show_default=True, type=click.FloatRange(0, min_open=True), help="Of a turn.")
@click.option("--cycles", default=3, show_default=True, type=click.IntRange(1), help="Turns of a policy per answer.")
@click.option("--num-prompts", default=512, show_default=True, type=click.IntRange(1))
@click.option("--max-tokens", default=512, show_default=True, type=click.IntRange(1), help="Of an answer.")
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
        record = provenance.record() | {"prompts": provenance.files(options["files"])}
        if (output / "turns.csv").exists():
            raise ConfigError(f"--output {output} holds turns already; name another folder")
        output.mkdir(parents=True, exist_ok=True)
        provenance.write_json(output / "provenance.json", record)
        flags = [
            *dspark_flags(options["draft"]),
            "--dtype",
            options["dtype"],
            NO_OVERLAP,
            *options["server_flags"].split(),
        ]
        device_flags, env = (CPU_FLAGS, CPU_ENV) if options["device"] == "cpu" else ((), None)
        with LaunchedServer(options["target"], *device_flags, *flags, env=env) as server:
            sampling = Sampling(options["max_tokens"], temperature=0.0, ignore_eos=True, raw=options["raw_prompts"])
            turns = Turns(server, prompts, options["seconds"], options["cycles"], sampling)
            for users in options["concurrency"]:
                rows = asyncio.run(turns.run(configurations, users, options["rounds"]))
                for row in rows:  # load by load, so that a run that is cut short keeps what it measured
                    append_row(output / "turns.csv", row)
                console.print(f"{users} users measured", highlight=False)
        frame = read_sweep(output / "turns.csv")
    except DSparkError as error:
        raise click.ClickException(str(error)) from error
    if len(configurations) > 1:
        pairs = ratios_to_each(frame, "decode_tok_s", configurations[0].label)
        console.print(ratio_table(summarise(pairs), "decode_tok_s"))


if __name__ == "__main__":
    main()
