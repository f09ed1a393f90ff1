"""Reinforcement learning on a CPU, with SGLang's engine: rollouts with DSPARK, a reward, an update, new weights.

    python benchmarks/rollouts.py --target T --draft D --output rollouts.json

The target learns to answer sums: it samples a group of answers to each at temperature 1, an answer with the right
number at its end earns 1, and a policy gradient follows what beats its group. The drafter stays as it is. An engine
without DSPARK gets the same weights and sums, alternately before the one with it and after it. Each round reports
reward, accept length, tokens per second of both engines and their ratio, by version of the weights. After the last one,
tokens that both sample are tested against the target's distribution, and against each other.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from numpy.typing import NDArray
from paired_ratio import spread_of
from safetensors.torch import load_file, save_file
from scipy.stats import ks_2samp, kstest, kstwobign, norm
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_dspark.tools import provenance
from sglang_dspark.tools.launch import CPU_ENV, CPU_FLAGS, dspark_flags

LEARNING_RATE, MOST_NORM = 2e-5, 1.0
FIRST_TOKENS = 8  # of a sample: more than a block of the bundled drafter
BATCH = 16
ALPHA = 0.001
FLAGS = ("--dtype", "float32", "--log-level", "error")
SHOWN = """Q: Tom has 3 apples and buys 2 more. How many apples has he?
A: 3 + 2 = 5. Tom has 5 apples.

"""
SUMS = (
    "Q: Anna has {a} coins and finds {b} more. How many coins has she?\nA:",
    "Q: There are {a} people on a bus, and {b} more get on. How many people are there?\nA:",
)

Answer = dict[str, Any]


class Engine:
    """SGLang's engine in a process of its own: two of them in one process would share their settings.

    Args:
        words: its flags.
    """

    def __init__(self, words: Sequence[str]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, words))
        self._process.start()
        other.close()

    def rollouts(self, prompts: Sequence[list[int]], group: int, **parameters: Any) -> list[list[Answer]]:
        """Return a group of sampled answers to each prompt."""
        asked = [prompt for prompt in prompts for _ in range(group)]
        parameters = {"temperature": 1.0, "stop": ["\n"], **parameters}
        answers = self._ask(("generate", {"input_ids": asked, "sampling_params": parameters}))
        return [answers[first : first + group] for first in range(0, len(answers), group)]

    def take(self, path: Path) -> None:
        """Take the weights of a file.

        Raises:
            RuntimeError: the engine has not taken them.
        """
        for success, message in self._ask(("take", path)):
            if not success:
                raise RuntimeError(f"the weights of {path} were not taken: {message}")

    def shutdown(self) -> None:
        """End the process and the engine's."""
        self._pipe.send(None)
        self._process.join()

    def _ask(self, call: tuple[str, Any]) -> Any:
        self._pipe.send(call)
        return self._pipe.recv()


def _serve(pipe: Any, words: Sequence[str]) -> None:
    """Answer calls, in a process of its own, until there is None."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang import Engine as SglangEngine  # only now does it know the flags of the plugin
    from sglang.srt.server_args import prepare_server_args

    engine = SglangEngine(server_args=prepare_server_args(list(words)))
    while (call := pipe.recv()) is not None:
        name, given = call
        if name == "generate":
            pipe.send(engine.generate(**given))
        else:  # as trainers of the framework do
            pipe.send(
                [
                    engine.begin_weight_update(selector="target"),
                    engine.update_weights_from_tensor(list(load_file(given).items())),
                    engine.end_weight_update(),
                ]
            )
    engine.shutdown()


def sums(tokenizer: Any, number: int, draw: random.Random) -> list[tuple[list[int], int]]:
    """Return questions after answered ones, as token ids, with their results."""
    asked = []
    for _ in range(number):
        a, b = draw.randrange(1, 10), draw.randrange(1, 10)
        asked.append((tokenizer(SHOWN + draw.choice(SUMS).format(a=a, b=b))["input_ids"], a + b))
    return asked


def reward(text: str, result: int) -> float:
    """Return 1 if the last number of a text's first line is the result."""
    numbers = re.findall(r"\d+", text.strip().partition("\n")[0])
    return float(bool(numbers) and int(numbers[-1]) == result)


def learn(model: Any, optimizer: Any, rounds: Sequence[tuple[list[int], list[Answer], NDArray[np.float64]]]) -> float:
    """Take one step along the policy gradient of all groups whose rewards differ; return its norm."""
    optimizer.zero_grad()
    taken = sum(len(answers) for _, answers, rewards in rounds if rewards.std() > 0)
    for prompt, answers, rewards in rounds:
        if rewards.std() == 0:
            continue
        for answer, advantage in zip(answers, (rewards - rewards.mean()) / rewards.std(), strict=True):
            ids = torch.tensor([prompt + list(answer["output_ids"])])
            logprobs = model(ids[:, :-1]).logits[0].log_softmax(-1)[len(prompt) - 1 :]
            said = logprobs.gather(1, ids[0, len(prompt) :, None])
            (-advantage * said.mean() / taken).backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), MOST_NORM))
    optimizer.step()
    return norm


def speculation(answers: Sequence[Answer]) -> dict[str, float]:
    """Return what became of the drafts of these answers; those that were verified and not drafted are copies."""
    infos = [counts for answer in answers if (counts := answer["meta_info"].get("dspark"))]
    names = ("rounds", "drafted_tokens", "verified_tokens", "accepted_tokens")
    total = {name: sum(info[name] for info in infos) for name in names}
    return {**total, "accept_length": round(1 + total["accepted_tokens"] / max(1, total["rounds"]), 3)}


def hand_over(engines: Mapping[str, Engine], model: Any) -> None:
    """Give all engines the weights."""
    named = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    named.pop("lm_head.weight", None)  # the embedding
    with tempfile.TemporaryDirectory() as folder:
        save_file(named, path := Path(folder, "weights.safetensors"))
        for engine in engines.values():
            engine.take(path)


def take_turns(engines: Mapping[str, Engine], first: int, *given: Any, **how: Any) -> dict[str, tuple[Any, float]]:
    """Return the groups of each engine and its tokens per second; the first one changes with the round."""
    found, names = {}, list(engines)
    for name in names[first % 2 :] + names[: first % 2]:
        began = time.monotonic()
        groups = engines[name].rollouts(*given, **how)
        tokens = sum(len(answer["output_ids"]) for answers in groups for answer in answers)
        found[name] = groups, tokens / (time.monotonic() - began)
    return found


def uniforms(expected: torch.Tensor, tokens: torch.Tensor, draw: np.random.Generator) -> NDArray[np.float64]:
    """Return numbers that are uniform and independent if [n] tokens were drawn from their [n, V] distributions.

    This is Rosenblatt's transform: the place of a token in its cumulative distribution, likeliest tokens first.
    """
    ranked, order = expected.double().sort(dim=1, descending=True, stable=True)
    is_drawn = order == tokens[:, None]
    ends, widths = ranked.cumsum(1)[is_drawn].numpy(), ranked[is_drawn].numpy()
    return ends - widths * draw.random(len(ends))


@torch.no_grad()
def next_distributions(model: Any, prompt: Sequence[int], answers: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return [answers * n, V] at temperature 1 for the tokens of answers of equal length n to one prompt."""
    ids = torch.tensor([[*prompt, *answer] for answer in answers])
    found: torch.Tensor = model(ids).logits[:, len(prompt) - 1 : -1].softmax(-1).flatten(0, 1)
    return found


def noticed(tokens: float) -> float:
    """Return the distance of cumulative distributions that a test of so many tokens notices nine times of ten."""
    return float((kstwobign.isf(ALPHA) + norm.ppf(0.9) / 2) / np.sqrt(tokens))


def compare(engines: Mapping[str, Engine], model: Any, prompt: list[int], number: int) -> dict[str, Any]:
    """Test tokens of each engine against the target's distribution and each other, by Kolmogorov and Smirnov."""
    draw, samples = np.random.default_rng(0), {}
    for name, engine in engines.items():
        fields = {"max_new_tokens": FIRST_TOKENS, "ignore_eos": True, "stop": None}
        [given] = engine.rollouts([prompt], number, **fields)
        answers = [answer["output_ids"] for answer in given]
        parts = [answers[first : first + BATCH] for first in range(0, number, BATCH)]
        samples[name] = np.concatenate(
            [uniforms(next_distributions(model, prompt, part), torch.tensor(part).flatten(), draw) for part in parts]
        )
    tokens = number * FIRST_TOKENS
    tests = {f"{name} and the target": kstest(found, "uniform") for name, found in samples.items()}
    tests["dspark and plain"] = ks_2samp(*samples.values())
    return {
        "tokens": tokens,
        "alpha": ALPHA,
        "distance_noticed_with_power_0.9": {"of one sample": noticed(tokens), "of two samples": noticed(tokens / 2)},
        "p_values": {name: round(float(test.pvalue), 4) for name, test in tests.items()},
    }


@click.command()
@click.option("--target", required=True, help="Folder of the target.")
@click.option("--draft", required=True, help="Folder of the drafter.")
@click.option("--rounds", default=4, help="Updates.")
@click.option("--prompts", default=8, help="Sums in each round.")
@click.option("--group", default=8, help="Answers to each.")
@click.option("--max-tokens", default=24, help="Of an answer.")
@click.option("--samples", default=256, help="For the comparison, of each engine.")
@click.option("--flag", "flags", multiple=True, help="More of the engine's flags.")
@click.option("--output", type=click.Path(path_type=Path), required=True)
def main(
    target: str,
    draft: str,
    rounds: int,
    prompts: int,
    group: int,
    max_tokens: int,
    samples: int,
    flags: Sequence[str],
    output: Path,
) -> None:
    """Run the loop and write what it shows."""
    os.environ.update(CPU_ENV)  # SGLang reads them as it is imported
    tokenizer = AutoTokenizer.from_pretrained(target)
    drafts = {"dspark": (*dspark_flags(draft), *flags), "plain": ()}
    engines = {
        name: Engine([str(word) for word in ("--model-path", target, *more, *CPU_FLAGS, *FLAGS)])
        for name, more in drafts.items()
    }
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    optimizer, draw, rows = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE), random.Random(0), []
    take_turns(engines, 0, [prompt for prompt, _ in sums(tokenizer, prompts, draw)], 1, max_new_tokens=4)  # a warm-up
    for version in range(rounds + 1):
        asked = sums(tokenizer, prompts, draw)
        turns = take_turns(engines, version, [prompt for prompt, _ in asked], group, max_new_tokens=max_tokens)
        groups, speeds = turns["dspark"][0], {name: speed for name, (_, speed) in turns.items()}
        earned = [
            np.array([reward(tokenizer.decode(answer["output_ids"]), result) for answer in answers])
            for (_, result), answers in zip(asked, groups, strict=True)
        ]
        row: dict[str, Any] = {"version": version, "reward": round(float(np.mean(earned)), 3)}
        row |= {f"{name}_tokens_per_s": round(speed, 2) for name, speed in speeds.items()}
        row |= {"ratio": round(speeds["dspark"] / speeds["plain"], 3)}
        rows.append(row | speculation([answer for answers in groups for answer in answers]))
        click.echo(json.dumps(rows[-1]))
        if version < rounds:
            taught = [
                (prompt, *pair) for (prompt, _), pair in zip(asked, zip(groups, earned, strict=True), strict=True)
            ]
            rows[-1]["gradient_norm"] = round(learn(model, optimizer, taught), 3)
            hand_over(engines, model)
    found = {**provenance.record(), "rounds": rows, "tokens_per_s": spread_of([row["ratio"] for row in rows])}
    click.echo(json.dumps(found["tokens_per_s"]))
    provenance.write_json(output, found)  # the comparison takes longer than a round
    compared = compare(engines, model, sums(tokenizer, 1, draw)[0][0], samples)
    click.echo(json.dumps(compared))
    for engine in engines.values():
        engine.shutdown()
    provenance.write_json(output, {**found, "samples": compared})


if __name__ == "__main__":
    main()
