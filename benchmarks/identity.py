"""Is the greedy text with DSPARK the text of the target alone? Long form, on a real model, through real servers.

    python benchmarks/identity.py --target T --draft D --prompts FILE [--prompts FILE ...] --output results.json
    python benchmarks/identity.py --device cuda --dtype bfloat16 ...

Every text that differs is listed with the place of the split, which judge.py judges: it has to be a near-tie of the
target in float32 (a gap below 1e-4 where both servers run in float32; SGLang's kernels for CUDA have no such form, and
in 16 bits, where many texts split, it is below 0.25), or a token that the target alone writes there in batches of that
size. Any other split makes the exit status 1. The target alone, with other numbers of users than 8, comes first: two
plain servers differ as well. The report says how many of the target's tokens are near-ties, and with which probability
each scenario would have noticed that 0.5 % of the tokens are wrong.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from judge import LEAK, NEAR_TIE, Judge, judged_tokens, power
from rich.console import Console
from transformers import AutoTokenizer

from sglang_dspark.files import atomic_write_text
from sglang_dspark.tools import provenance
from sglang_dspark.tools.launch import CPU_ENV, CPU_FLAGS, CUDA_MEMORY_FLAGS, LaunchedServer, dspark_flags
from sglang_dspark.tools.prompts import read_prompts

RETRACTED = "Retract requests"
USERS = 8
"""At a time, whose texts are the expected ones."""
_MEAN_S_BETWEEN_CHANGES = 0.02  # about a step on a CPU


@dataclass(frozen=True)
class Scenario:
    """A way to run the DSPARK server that has to leave the text alone."""

    name: str
    policy: str
    users: int = USERS
    flags: tuple[str, ...] = ()
    passes: int = 1  # all but the last are warm-up: the last is compared
    log_must_show: str = ""
    must_hit_cache: bool = False


# Under `changing` the lengths have nothing to do with the text: `static` is switched at random instants from 0 to all
# drafts, and requests bring limits of their own.
CHANGING = "changing"
SCENARIOS = (
    *(Scenario(f"{policy}, 1 user", policy, users=1) for policy in ("auto", CHANGING)),
    *(Scenario(f"{policy}, {users} users", policy, users) for policy in ("auto", CHANGING) for users in (4, 16)),
    Scenario("no overlap", CHANGING, flags=("--disable-overlap-schedule",)),
    # Room for every prompt and answer: in the default pool the second pass finds little more than the system prompt.
    Scenario("radix-cache hits", CHANGING, flags=("--max-total-tokens", "40960"), passes=2, must_hit_cache=True),
    Scenario("chunked prefill of 64", CHANGING, flags=("--chunked-prefill-size", "64")),
    Scenario(
        "retraction",
        CHANGING,
        flags=("--max-total-tokens", "1600", "--schedule-conservativeness", "0.01"),
        log_must_show=RETRACTED,
    ),
)


@dataclass(frozen=True)
class Comparison:
    """Compare texts with those of the target alone.

    Attributes:
        prompts: token ids.
        plain: texts of the target alone, by number of users at a time.
        tie_share: of its tokens.
    """

    prompts: list[list[int]]
    plain: dict[int, list[list[int]]]
    judge: Judge
    tie_share: float

    def of(self, texts: Sequence[list[int]], plain: Sequence[list[list[int]]] = ()) -> dict[str, Any]:
        """Compare texts with the expected ones; the result goes into the report as it is.

        Args:
            plain: further texts of the target alone that excuse a split.
        """
        splits = self.judge.splits(self.prompts, self.plain[USERS], texts, plain)
        tokens = judged_tokens(texts, splits)
        return {
            "texts": len(texts),
            "tokens": sum(map(len, texts)),
            "identical": len(texts) - len(splits),
            "splits": [vars(split) for split in splits],
            "judged_tokens": tokens,
            "power": power(tokens, self.tie_share),
            "passed": all(split.explained for split in splits),
        }


def generate(
    server: LaunchedServer,
    prompts: Sequence[list[int]],
    max_tokens: int,
    concurrency: int,
    most_verified: Sequence[int] | None = None,
) -> list[dict[str, Any]]:
    """Return the greedy answers in order.

    Args:
        most_verified: per prompt, most drafts that a step may verify; None leaves it to the server.
    """
    parameters = {"temperature": 0, "max_new_tokens": max_tokens}

    def one(index: int) -> dict[str, Any]:
        options = {} if most_verified is None else {"speculation": {"max_verify": most_verified[index]}}
        body = {"input_ids": prompts[index], "sampling_params": parameters, **options}
        return dict(server.post_json("/generate", body))

    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(one, range(len(prompts))))


@contextmanager
def changing_lengths(server: LaunchedServer, block_size: int) -> Iterator[None]:
    """Verify another number of drafts per request from one random instant to the next."""
    rng, done = random.Random(0), threading.Event()

    def change() -> None:
        while not done.wait(rng.expovariate(1 / _MEAN_S_BETWEEN_CHANGES)):
            server.post_json("/dspark/policy", {"policy": "static", "verify_len": rng.randint(0, block_size)})

    with ThreadPoolExecutor(1) as pool:
        changing = pool.submit(change)
        try:
            yield
        finally:
            done.set()
            changing.result()


def run_scenario(scenario: Scenario, server: LaunchedServer, comparison: Comparison, max_tokens: int) -> dict[str, Any]:
    """Run one scenario and compare; the result goes into the report as it is."""
    prompts = comparison.prompts
    server.flush_cache()
    before = server.get_json("/dspark/stats")
    if scenario.policy == CHANGING:
        block_size = server.get_json("/dspark/capabilities")["block_size"]
        most = [random.Random(index).randint(0, block_size) for index in range(len(prompts))]
        lengths: AbstractContextManager[None] = changing_lengths(server, block_size)
    else:
        server.post_json("/dspark/policy", {"policy": scenario.policy})
        most, lengths = None, nullcontext()
    with lengths:
        for _ in range(scenario.passes):
            answers = generate(server, prompts, max_tokens, scenario.users, most)
    after = server.get_json("/dspark/stats")
    log = server.log_path.read_text(errors="replace")
    rounds, verified, committed = (
        after[key] - before[key] for key in ("rounds", "verified_tokens", "committed_tokens")
    )
    cached = sum(answer["meta_info"]["cached_tokens"] for answer in answers)
    shown = log.count(scenario.log_must_show) if scenario.log_must_show else None
    texts = [answer["output_ids"] for answer in answers]
    found = comparison.of(texts, [comparison.plain[scenario.users]])
    return {
        "scenario": scenario.name,
        "policy": scenario.policy,
        "users": scenario.users,
        "flags": list(scenario.flags),
        **found,
        "cached_tokens": cached,
        "retractions_in_log": shown,
        "accept_length": committed / rounds,
        "verify_length": verified / rounds,
        "passed": found["passed"] and shown != 0 and (cached > 0 or not scenario.must_hit_cache),
    }


def texts_alone(
    server: LaunchedServer, prompts: list[list[int]], max_tokens: int, users: Iterable[int]
) -> dict[int, list[list[int]]]:
    """Return the texts of the target alone, by the number of users at a time."""
    texts = {}
    for count in users:
        server.flush_cache()
        texts[count] = [answer["output_ids"] for answer in generate(server, prompts, max_tokens, count)]
    return texts


def encode(target: Path, files: Sequence[Path], num: int) -> list[list[int]]:
    """Return the first ``num / len(files)`` prompts of every file as chat prompts."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    texts = [text for file in files for text in read_prompts(file, -(-num // len(files)))][:num]
    messages = [[{"role": "user", "content": text}] for text in texts]
    return [tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=False) for m in messages]


@click.command(help=__doc__)
@click.option("--target", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--draft", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--prompts", "files", type=click.Path(path_type=Path, exists=True), multiple=True, required=True)
@click.option("--num-prompts", default=100, show_default=True)
@click.option("--max-tokens", default=128, show_default=True)
@click.option("--device", default="cpu", show_default=True, type=click.Choice(["cpu", "cuda"]))
@click.option("--dtype", default="float32", show_default=True, type=click.Choice(list(NEAR_TIE)))
@click.option("--only", default="", help="Run the scenarios whose name contains this text.")
@click.option("--server-flags", default="", help="Further arguments of every server, as one text.")
@click.option("--output", type=click.Path(path_type=Path), required=True)
def main(target: Path, draft: Path, output: Path, max_tokens: int, device: str, dtype: str, **options: Any) -> None:
    """Run every scenario, and print and write what it shows."""
    console, files = Console(), options["files"]
    prompts = encode(target, files, options["num_prompts"])
    device_flags, env = (CPU_FLAGS, CPU_ENV) if device == "cpu" else (CUDA_MEMORY_FLAGS, {})
    flags = [*device_flags, "--dtype", dtype, *options["server_flags"].split()]
    wanted = [scenario for scenario in SCENARIOS if options["only"] in scenario.name]
    head: dict[str, Any] = {
        **provenance.record(),
        "device": device,
        "dtype": dtype,
        "prompts": [file.name for file in files],
        "max_tokens": max_tokens,
        "near_tie": NEAR_TIE[dtype],
        "leak": LEAK,
    }
    results: list[dict[str, Any]] = []

    def keep(result: dict[str, Any]) -> None:
        """Write what is found as soon as it is: the proof takes a quarter of an hour."""
        results.append(result)
        atomic_write_text(output, json.dumps({**head, "scenarios": results}, indent=1) + "\n")
        console.print({k: v for k, v in result.items() if k != "splits"})

    output.parent.mkdir(parents=True, exist_ok=True)
    with LaunchedServer(target, *flags, env=env) as server:
        plain = texts_alone(server, prompts, max_tokens, sorted({USERS, *(scenario.users for scenario in wanted)}))
    judge = Judge(target, device, NEAR_TIE[dtype])
    head["tie_share"] = judge.tie_share(prompts, plain[USERS])
    console.print(f"target alone: {len(prompts)} texts, {head['tie_share']:.2%} of their tokens are near-ties")
    comparison = Comparison(prompts, plain, judge, head["tie_share"])
    for users, texts in plain.items():
        if users != USERS:
            keep({"scenario": f"target alone, {users} users", **comparison.of(texts)})
    for extra, group in itertools.groupby(wanted, key=lambda scenario: scenario.flags):
        with LaunchedServer(target, *flags, *dspark_flags(draft), *extra, env=env) as server:
            for scenario in group:
                keep(run_scenario(scenario, server, comparison, max_tokens))
    sys.exit(0 if all(result["passed"] for result in results) else 1)


if __name__ == "__main__":
    main()
