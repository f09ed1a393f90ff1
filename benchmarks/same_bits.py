"""Are the tokens and log-probabilities of a request the same bits, whatever else the server does? On real servers.

    python benchmarks/same_bits.py --target T --draft D --prompts FILE [--prompts FILE ...] --output results.json
    python benchmarks/same_bits.py --dtype bfloat16 --server-flags --enable-deterministic-inference ...
    python benchmarks/same_bits.py --identifiers 100 ...

Half of the requests are greedy, the others are sampled with a seed. The expected answers are those of the same server
with `off`, one user and an empty prefix cache. Every scenario sends the same requests, and counts the answers whose
tokens, and whose tokens and log-probabilities, equal the expected ones in every bit. Where the capabilities of the
server say `same_bits`, one that differs makes the exit status 1.

With `--identifiers`, greedy requests copy a list of random identifiers from somewhere in it on, and wrong copies are
counted.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from identity import CHANGING, RETRACTED, changing_lengths, encode
from rich.console import Console
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from sglang_dspark.files import atomic_write_text
from sglang_dspark.tools import provenance
from sglang_dspark.tools.launch import CPU_ENV, CPU_FLAGS, CUDA_MEMORY_FLAGS, LaunchedServer, dspark_flags


@dataclass(frozen=True)
class Scenario:
    """A way to run the server that must leave every bit alone.

    Attributes:
        policy: ``off``, ``auto``, ``static:N``, or changing at random instants.
        users: requests at a time.
        flags: of a server of its own.
        cached: whether the prompts are in the prefix cache.
        speculation: the field of the requests.
    """

    policy: str
    users: int
    flags: tuple[str, ...] = ()
    cached: bool = False
    speculation: tuple[tuple[str, str | int], ...] = ()

    @property
    def name(self) -> str:
        fields = (f"{key} {value}" for key, value in self.speculation)
        return ", ".join([self.policy, f"{self.users} users", *self.flags, *fields, *["cached prompts"] * self.cached])


EXPECTED = Scenario("off", 1)
SCENARIOS = (
    *(Scenario("off", users) for users in (4, 16)),
    *(Scenario(f"static:{length}", users) for length in (1, 3, 5) for users in (1, 16)),
    *(Scenario("auto", users) for users in (1, 4, 16)),
    *(Scenario(policy, 4, cached=True) for policy in ("off", "auto")),
    Scenario(CHANGING, 8),
    Scenario("auto", 4, speculation=(("preset", "summarization"),)),
    Scenario("auto", 8, flags=("--chunked-prefill-size", "64")),
    Scenario(CHANGING, 8, flags=("--max-total-tokens", "1600", "--schedule-conservativeness", "0.01")),
)


LISTED, COPIED = 60, 4
"""Identifiers of a prompt, and of its answer."""

Answer = list[Sequence[float]]
"""[log-probability, token] of every token."""


@dataclass(frozen=True)
class Requests:
    """What is asked.

    Attributes:
        prompts: token ids.
        max_tokens: of the longest answer; lengths are mixed.
        copies: what the answers shall begin with; empty where nothing is copied.
    """

    prompts: Sequence[list[int]]
    max_tokens: int
    copies: Sequence[str] = ()

    @classmethod
    def of_identifiers(cls, number: int, tokenizer: PreTrainedTokenizerBase) -> Requests:
        """Return requests that list identifiers, and the beginning of the same list, which the answer goes on with."""
        rng, prompts, copies = random.Random(0), [], []
        for _ in range(number):
            listed = ["".join(rng.choices("abcdefghjkmnpqrstuvwxyz23456789", k=8)) for _ in range(LISTED)]
            begin = rng.randrange(LISTED - COPIED)
            lines = ["A list:", *listed, "", "The same list again:", *listed[:begin], ""]
            prompts.append(tokenizer.encode("\n".join(lines)))
            copies.append("\n".join(listed[begin : begin + COPIED]))
        return cls(prompts, 16 * COPIED, copies)

    def body(self, index: int) -> dict[str, Any]:
        """Return the body of a request."""
        drawn: dict[str, Any] = {"temperature": 0}
        length = self.max_tokens
        if not self.copies:
            drawn = {"temperature": 0.8, "top_p": 0.95, "sampling_seed": index} if index % 2 else drawn
            length = max(1, length - index % 7 * length // 10)
        parameters = {**drawn, "max_new_tokens": length, "ignore_eos": True}
        return {"input_ids": self.prompts[index], "sampling_params": parameters, "return_logprob": True}


def answers(server: LaunchedServer, requests: Requests, scenario: Scenario) -> list[Answer]:
    """Return the answers, in order."""

    def one(index: int) -> Answer:
        body = requests.body(index)
        if scenario.speculation:
            body["speculation"] = dict(scenario.speculation)
        answer = server.post_json("/generate", body)
        return [entry[:2] for entry in answer["meta_info"]["output_token_logprobs"]]

    with ThreadPoolExecutor(scenario.users) as pool:
        return list(pool.map(one, range(len(requests.prompts))))


def run(server: LaunchedServer, requests: Requests, scenario: Scenario) -> list[Answer]:
    """Return the answers of a scenario."""
    server.flush_cache()
    if scenario.policy == CHANGING:
        with changing_lengths(server, server.get_json("/dspark/capabilities")["block_size"]):
            return answers(server, requests, scenario)
    policy, _, length = scenario.policy.partition(":")
    server.post_json("/dspark/policy", {"policy": policy} | ({"verify_len": int(length)} if length else {}))
    if scenario.cached:
        answers(server, replace(requests, max_tokens=1), scenario)
    return answers(server, requests, scenario)


def compared(expected: Sequence[Answer], found: Sequence[Answer]) -> dict[str, int]:
    """Count the answers that equal the expected ones, in their tokens and in all."""
    pairs = list(zip(expected, found, strict=True))
    return {
        "answers": len(pairs),
        "same_tokens": sum([token for _, token in a] == [token for _, token in b] for a, b in pairs),
        "same_bits": sum(a == b for a, b in pairs),
    }


def wrong_copies(found: Sequence[Answer], requests: Requests, tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Count the answers that do not begin with what was asked for."""
    texts = [tokenizer.decode([int(token) for _, token in answer]).lstrip() for answer in found]
    wrong = sum(not text.startswith(copy) for text, copy in zip(texts, requests.copies, strict=False))
    return {"wrong_copies": wrong} if requests.copies else {}


@click.command(help=__doc__)
@click.option("--target", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--draft", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--prompts", "files", type=click.Path(path_type=Path, exists=True), multiple=True)
@click.option("--identifiers", default=0, help="Have so many lists of identifiers copied, and ask nothing else.")
@click.option("--num-prompts", default=200, show_default=True)
@click.option("--max-tokens", default=64, show_default=True)
@click.option("--device", default="cpu", show_default=True, type=click.Choice(["cpu", "cuda"]))
@click.option("--dtype", default="float32", show_default=True)
@click.option("--only", default="", help="Run the scenarios whose name contains this text.")
@click.option("--server-flags", default="", help="Further arguments of every server, as one text.")
@click.option("--output", type=click.Path(path_type=Path), required=True)
def main(target: Path, draft: Path, output: Path, max_tokens: int, device: str, dtype: str, **options: Any) -> None:
    """Run every scenario, and print and write what it shows."""
    console, tokenizer = Console(), AutoTokenizer.from_pretrained(target)
    if options["identifiers"]:
        requests = Requests.of_identifiers(options["identifiers"], tokenizer)
    else:
        requests = Requests(encode(target, options["files"], options["num_prompts"]), max_tokens)
    device_flags, env = (CPU_FLAGS, CPU_ENV) if device == "cpu" else (CUDA_MEMORY_FLAGS, {})
    flags = [*device_flags, "--dtype", dtype, *options["server_flags"].split(), *dspark_flags(draft)]
    report: dict[str, Any] = {
        **provenance.record(),
        "device": device,
        "dtype": dtype,
        "server_flags": options["server_flags"],
        "prompts": [file.name for file in options["files"]],
        "identifiers": options["identifiers"],
        "max_tokens": requests.max_tokens,
        "scenarios": [],
    }
    wanted = [scenario for scenario in SCENARIOS if options["only"] in scenario.name]
    for own in dict.fromkeys(((), *(scenario.flags for scenario in wanted))):
        with LaunchedServer(target, *flags, *own, env=env) as server:
            report["same_bits"] = server.get_json("/dspark/capabilities")["features"]["same_bits"]
            expected = run(server, requests, EXPECTED)
            for scenario in (EXPECTED, *(scenario for scenario in wanted if scenario.flags == own)):
                found = run(server, requests, scenario)
                result = {"scenario": scenario.name, **compared(expected, found)}
                result |= wrong_copies(found, requests, tokenizer)
                if "--max-total-tokens" in own and scenario.users > 1:
                    result["retractions"] = server.log_path.read_text(errors="replace").count(RETRACTED)
                report["scenarios"].append(result)
                atomic_write_text(output, json.dumps(report, indent=1) + "\n")
                console.print(result)
    differ = sum(result["answers"] - result["same_bits"] for result in report["scenarios"])
    missing = any(result.get("retractions") == 0 for result in report["scenarios"])
    sys.exit(1 if missing or (report["same_bits"] and differ) else 0)


if __name__ == "__main__":
    main()
