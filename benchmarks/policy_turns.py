r"""Compare policies on one server, where they take turns of a few steps while it decodes.

    python benchmarks/policy_turns.py --target TARGET --draft DRAFT --prompts FILE --output RESULTS \
        --config auto --config static:3 --config static:5 --concurrency 1,4,16 --rounds 20
    python benchmarks/paired_ratio.py RESULTS/turns.csv --metric decode_tok_s --of auto@bfloat16

A shared machine changes its speed by ten percent from one second to the next, so a turn is a fraction of a second:
policies are switched while requests are being decoded, and the server says with every switch what it has counted until
then. Some texts are easier to draft than others, so a round decodes the same texts once per policy, and each policy has
its turn at every part of them. Prompts are in the prefix cache, and nothing is counted before all users are being
served or after the first answer has ended. Batches of prompts do not overlap, and paired_ratio.py makes intervals of
batches, so that they hold for other texts as well. What a user sees, prefill and all, is for ``sweep_concurrency.py``.

The server runs without overlap scheduling, so that a step is counted before the next one is chosen.

RESULTS, a new folder, gets ``turns.csv``, one row per policy, load and round, and ``provenance.json``.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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

Answers = Sequence[Future[Any]]


@dataclass(frozen=True)
class Turns:
    """A server, and simulated users that send it the given prompts.

    Attributes:
        prompts: shuffled and divided into batches, one prompt per user; each round decodes the next batch, and when all
            have been decoded, the first one again.
        seconds: of a turn.
        cycles: turns that each policy has while the same answers are being decoded.
        sampling: how all prompts are asked; answers have to last for all turns.
    """

    server: LaunchedServer
    prompts: Sequence[Prompt]
    seconds: float
    cycles: int
    sampling: Sampling

    def run(self, configurations: Sequence[Configuration], users: int, num_rounds: int) -> list[dict[str, Any]]:
        """Return one row per configuration and round; what comes before the first round is not counted."""
        shuffle, rows = random.Random(SEED), []
        batches = prompt_batches(self.prompts, users)
        with ThreadPoolExecutor(users) as pool:
            self._prefill(pool, batches[-1])
            self._decode(pool, batches[-1], configurations, _nothing(configurations))
            for number in range(num_rounds):
                batch = number % len(batches)
                self._prefill(pool, batches[batch])
                order = shuffle.sample(configurations, len(configurations))
                sums = _nothing(order)
                for shift in range(len(order)):
                    self._decode(pool, batches[batch], order[shift:] + order[:shift], sums)
                rows += [_row(each, users, number, batch, sums[each.label]) for each in configurations]
                if any(counts["rounds"] != users * counts["steps"] for counts in sums.values()):
                    raise DSparkError(f"the server did not decode for all {users} users at a time; ask for fewer")
        return rows

    def _prefill(self, pool: ThreadPoolExecutor, prompts: Sequence[Prompt]) -> None:
        """Put prompts into the prefix cache."""
        for answer in self._ask(pool, prompts, replace(self.sampling, max_tokens=1)):
            answer.result()

    def _decode(
        self,
        pool: ThreadPoolExecutor,
        prompts: Sequence[Prompt],
        order: Sequence[Configuration],
        sums: dict[str, dict[str, float]],
    ) -> None:
        """Decode answers to ``prompts``, policies taking turns in this order, and add what they did to ``sums``."""
        begun = self._switch(order[0])
        answers = self._ask(pool, prompts, self.sampling)
        try:
            while self._committed() - begun["committed_tokens"] < LEAD_IN_TOKENS * len(prompts):
                _check_that_none_ended(answers)
                time.sleep(POLL_S)
            self._take_turns(list(order) * self.cycles, sums)
            _check_that_none_ended(answers)
        finally:
            self.server.post("/abort_request", {"rid": "", "abort_all": True})
        for answer in answers:
            answer.result()

    def _take_turns(self, turns: Sequence[Configuration], sums: dict[str, dict[str, float]]) -> None:
        before = self._switch(turns[0])
        for turn, following in zip(turns, [*turns[1:], turns[0]], strict=True):
            time.sleep(self.seconds)
            after = self._switch(following)
            for name in COUNTED:
                sums[turn.label][name] += after[name] - before[name]
            before = after

    def _switch(self, configuration: Configuration) -> dict[str, float]:
        """Return the server's counts up to the switch."""
        return dict(self.server.post_json("/dspark/policy", configuration.policy_fields)["until_now"])

    def _committed(self) -> int:
        return int(self.server.get_json("/dspark/stats")["committed_tokens"])

    def _ask(self, pool: ThreadPoolExecutor, prompts: Sequence[Prompt], sampling: Sampling) -> Answers:
        bodies = [request_body(prompt, sampling) | {"stream": False, "stream_options": None} for prompt in prompts]
        return [pool.submit(self.server.post_json, sampling.path, body) for body in bodies]


def _check_that_none_ended(answers: Answers) -> None:
    for answer in answers:
        if answer.done():
            answer.result()  # raises what the request failed with
            raise DSparkError("an answer ended before all policies had had their turns; raise --max-tokens")


def _row(configuration: Configuration, users: int, number: int, batch: int, counts: dict[str, float]) -> dict[str, Any]:
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
        flags = [*dspark_flags(options["draft"]), "--dtype", options["dtype"], NO_OVERLAP]
        flags += options["server_flags"].split()
        device_flags, env = (CPU_FLAGS, CPU_ENV) if options["device"] == "cpu" else ((), None)
        with LaunchedServer(options["target"], *device_flags, *flags, env=env) as server:
            sampling = Sampling(options["max_tokens"], temperature=0.0, ignore_eos=True, raw=options["raw_prompts"])
            turns = Turns(server, prompts, options["seconds"], options["cycles"], sampling)
            for users in options["concurrency"]:
                for row in turns.run(
                    configurations, users, options["rounds"]
                ):  # load by load, so that a run that is cut short keeps what it measured
                    append_row(output / "turns.csv", row)
                console.print(f"{users} users measured", highlight=False)
        frame = read_sweep(output / "turns.csv")
    except (DSparkError, OSError) as error:
        raise click.ClickException(str(error)) from error
    if len(configurations) > 1:
        pairs = ratios_to_each(frame, "decode_tok_s", configurations[0].label)
        console.print(ratio_table(summarise(pairs), "decode_tok_s"))


if __name__ == "__main__":
    main()
