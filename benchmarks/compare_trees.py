"""Two checkouts of the plugin side by side: is a step of the second one slower?

    git worktree add BEFORE COMMIT
    python benchmarks/compare_trees.py --target TARGET --draft DRAFT --prompts gsm8k.jsonl --before BEFORE --output FILE

A server of each checkout runs on the same machine with the same flags. By default both verify whole blocks, so that
steps are compared and not decisions; with ``--policy auto`` each measures a table of its own. Both answer the same
prompts in turns, in random order; the one that is not asked is suspended, and its first answer after that is not
recorded. Each round gives four ratios: of tokens per second from the first question to the last answer, of the time of
a step, of tokens per step, and of tokens per step over that time. The time of a step is without the half of the steps
that took least and longest, which a noisy neighbour disturbs most. Each ratio is a geometric mean over the rounds, with
a t interval of its logarithm.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Sequence
from contextlib import ExitStack, chdir
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import numpy as np
from scipy import stats
from serving.client import Endpoint, Reply, Sampling, ask_closed
from serving.prompts import Prompt, load_prompts

from sglang_dspark.tools import provenance
from sglang_dspark.tools.launch import CPU_ENV, CPU_FLAGS, LaunchedServer

HERE = Path(__file__).resolve().parents[1]
TREES = ("before", "after")
TURN = ("speed", "step_s", "tokens_per_step")  # what is recorded of every turn
DSPARK = ("--speculative-algorithm", "DSPARK", "--speculative-draft-model-path")


@dataclass(frozen=True)
class Turn:
    """Answers of one server to the prompts of one round.

    Attributes:
        seconds: from the first question to the last answer.
    """

    replies: Sequence[Reply]
    seconds: float

    @property
    def speed(self) -> float:
        """Tokens per second of all users."""
        return sum(reply.num_tokens for reply in self.replies) / self.seconds

    @property
    def step_s(self) -> float:
        """Time of a step in seconds: the mean of the middle half of the times between chunks."""
        return float(stats.trim_mean([gap for reply in self.replies for gap in reply.gaps_s], 0.25))

    @property
    def speed_by_step(self) -> float:
        """Tokens per second of one request while it decodes."""
        return self.tokens_per_step / self.step_s

    @property
    def tokens_per_step(self) -> float:
        """Tokens that one request gets of a step, in the mean."""
        return sum(reply.num_tokens for reply in self.replies) / sum(len(reply.chunks_s) for reply in self.replies)


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

    def turn(self, prompts: Sequence[Prompt], max_tokens: int) -> Turn:
        """Resume, answer something that is not recorded, then these prompts at once, and be suspended."""
        self.server.resume()
        self._answers(prompts[:1], 8)
        began = time.perf_counter()
        replies = self._answers(prompts, max_tokens)
        seconds = time.perf_counter() - began
        self.server.suspend()
        return Turn(replies, seconds)

    def _answers(self, prompts: Sequence[Prompt], max_tokens: int) -> list[Reply]:
        sampling = Sampling(max_tokens, temperature=0.0, ignore_eos=True, raw=True)
        return ask_closed(Endpoint(self.server.url), prompts, len(prompts), sampling)


def interval(ratios: Sequence[float]) -> dict[str, float]:
    """Geometric mean of ratios with the 95 % t interval of its logarithm."""
    logs = np.log(ratios)
    half = float(stats.t.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / len(logs) ** 0.5)
    mean = float(logs.mean())
    return {"ratio": float(np.exp(mean)), "low": float(np.exp(mean - half)), "high": float(np.exp(mean + half))}


def compare(
    trees: Sequence[Tree], prompts: Sequence[Prompt], users: int, rounds: int, max_tokens: int, rng: random.Random
) -> dict[str, Any]:
    """Both suspended servers, ``before`` and ``after``, in turns: ratios of their speeds, the turns, equal texts."""
    turns: dict[str, list[Turn]] = {tree.name: [] for tree in trees}
    for number in range(rounds):
        asked = [prompts[(number * users + place) % len(prompts)] for place in range(users)]
        for tree in rng.sample(trees, len(trees)):
            turns[tree.name].append(tree.turn(asked, max_tokens))
    pairs = list(zip(*turns.values(), strict=True))
    texts = [(one.text, other.text) for old, new in pairs for one, other in zip(old.replies, new.replies, strict=True)]
    named = {"speed": "speed", "step": "step_s", "tokens_per_step": "tokens_per_step", "speed_by_step": "speed_by_step"}
    return {
        "users": users,
        **{
            name: interval([getattr(new, measured) / getattr(old, measured) for old, new in pairs])
            for name, measured in named.items()
        },
        "equal_texts": sum(one == other for one, other in texts),
        **{tree: {key: [getattr(turn, key) for turn in done] for key in TURN} for tree, done in turns.items()},
    }


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
    prompts = [prompt for file in prompt_files for prompt in load_prompts(file)]
    rng.shuffle(prompts)
    results: list[dict[str, Any]] = []
    with TemporaryDirectory() as folder:
        pair = str(Path(target).resolve()), str(Path(draft).resolve())
        flags = ["--dtype", "bfloat16", "--speculative-dspark-schedule", policy]
        trees = [
            Tree(name, path, *pair, Path(folder) / f"{name}.json", flags)
            for name, path in zip(TREES, (before.resolve(), HERE), strict=True)
        ]
        with ExitStack() as stack:
            # A server imports what lies in the folder that it is started in before anything else.
            stack.enter_context(chdir(folder))
            for tree in trees:
                stack.enter_context(tree.server).suspend()
            for count in map(int, users.split(",")):
                results.append(compare(trees, prompts, count, rounds, max_tokens, rng))
                click.echo(json.dumps({key: found for key, found in results[-1].items() if key not in TREES}))
    provenance.write_json(output, {**provenance.record(), "loads": results})


if __name__ == "__main__":
    main()
