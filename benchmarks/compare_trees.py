"""Two checkouts of the plugin side by side: is a step of the second one slower?

    git worktree add BEFORE COMMIT
    python benchmarks/compare_trees.py --target TARGET --draft DRAFT --prompts gsm8k.jsonl --before BEFORE --output FILE

A server of each checkout runs on the same machine with the same flags. By default both verify whole blocks, so that
steps are compared and not decisions; with ``--policy auto`` each measures a table of its own. Both answer the same
prompts in turns, in random order; the one that is not asked is suspended, and its first answer after that is not
recorded. The ratio of their speeds is a geometric mean over the rounds, with a t interval of its logarithm.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, chdir
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import numpy as np
from scipy import stats

from sglang_dspark.tools import provenance
from sglang_dspark.tools.launch import CPU_ENV, CPU_FLAGS, LaunchedServer
from sglang_dspark.tools.prompts import read_prompts

HERE = Path(__file__).resolve().parents[1]
DSPARK = ("--speculative-algorithm", "DSPARK", "--speculative-draft-model-path")


class Tree:
    """The server of one checkout."""

    def __init__(self, name: str, folder: Path, target: str, draft: str, table: Path, flags: Sequence[str]) -> None:
        self.name = name
        env = {
            **CPU_ENV,
            "PYTHONPATH": f"{folder}{os.pathsep}{folder / 'kernels'}",
            "SGLANG_DSPARK_SPS_TABLE_PATH": str(table),
        }
        self.server = LaunchedServer(target, *CPU_FLAGS, *DSPARK, draft, *flags, env=env)

    def speed(self, prompts: Sequence[str], users: int, max_tokens: int) -> tuple[float, list[list[int]]]:
        """Output tokens per second of ``users`` users who send these prompts, and the answers."""
        began = time.perf_counter()
        with ThreadPoolExecutor(users) as pool:
            answers = list(pool.map(lambda prompt: self._answer(prompt, max_tokens), prompts))
        return sum(map(len, answers)) / (time.perf_counter() - began), answers

    def wake_up(self, prompt: str) -> None:
        """Resume, and answer something that is not recorded."""
        self.server.resume()
        self._answer(prompt, 16)

    def _answer(self, prompt: str, max_tokens: int) -> list[int]:
        parameters = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
        answer = self.server.post_json("/generate", {"text": prompt, "sampling_params": parameters})
        ids: list[int] = answer["output_ids"]
        return ids


def interval(ratios: Sequence[float]) -> dict[str, float]:
    """Geometric mean of ratios with the 95 % t interval of its logarithm."""
    logs = np.log(ratios)
    half = float(stats.t.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / len(logs) ** 0.5)
    mean = float(logs.mean())
    return {"ratio": float(np.exp(mean)), "low": float(np.exp(mean - half)), "high": float(np.exp(mean + half))}


def compare(
    trees: Sequence[Tree], prompts: Sequence[str], users: int, rounds: int, max_tokens: int, rng: random.Random
) -> dict[str, Any]:
    """Both suspended servers, ``before`` and ``after``, in turns: ratio of their speeds, the speeds, equal texts."""
    speeds: dict[str, list[float]] = {tree.name: [] for tree in trees}
    equal_texts = 0
    for number in range(rounds):
        asked = [prompts[(number * users + place) % len(prompts)] for place in range(users)]
        texts = []
        for tree in rng.sample(trees, len(trees)):
            tree.wake_up(asked[0])
            speed, answers = tree.speed(asked, users, max_tokens)
            tree.server.suspend()
            speeds[tree.name].append(speed)
            texts.append(answers)
        equal_texts += sum(one == other for one, other in zip(*texts, strict=True))
    before, after = (speeds[tree.name] for tree in trees)
    ratios = [new / old for old, new in zip(before, after, strict=True)]
    return {"users": users, **interval(ratios), "equal_texts": equal_texts, **speeds}


@click.command(help=__doc__)
@click.option("--target", required=True)
@click.option("--draft", required=True)
@click.option("--prompts", "prompt_files", required=True, multiple=True, type=click.Path(exists=True, path_type=Path))
@click.option("--before", required=True, type=click.Path(exists=True, path_type=Path), help="The other checkout.")
@click.option("--policy", default="static", show_default=True)
@click.option("--users", default="1,4,8", show_default=True)
@click.option("--rounds", default=8, show_default=True)
@click.option("--max-tokens", default=64, show_default=True)
@click.option("--output", required=True, type=click.Path(path_type=Path))
def main(
    target: str,
    draft: str,
    prompt_files: Sequence[Path],
    before: Path,
    policy: str,
    users: str,
    rounds: int,
    max_tokens: int,
    output: Path,
) -> None:
    """Command line; see the module."""
    rng = random.Random(0)
    prompts = [text for file in prompt_files for text in read_prompts(file)]
    rng.shuffle(prompts)
    results: list[dict[str, Any]] = []
    with TemporaryDirectory() as folder:
        pair = str(Path(target).resolve()), str(Path(draft).resolve())
        flags = ["--dtype", "bfloat16", "--speculative-dspark-schedule", policy]
        trees = [
            Tree(name, path, *pair, Path(folder) / f"{name}.json", flags)
            for name, path in (("before", before.resolve()), ("after", HERE))
        ]
        with ExitStack() as stack:
            # A server imports what lies in the folder that it is started in before anything else.
            stack.enter_context(chdir(folder))
            for tree in trees:
                stack.enter_context(tree.server).suspend()
            for count in map(int, users.split(",")):
                results.append(compare(trees, prompts, count, rounds, max_tokens, rng))
                click.echo(json.dumps({key: results[-1][key] for key in ("users", "ratio", "low", "high")}))
    provenance.write_json(output, {**provenance.record(), "loads": results})


if __name__ == "__main__":
    main()
