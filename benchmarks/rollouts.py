"""Reinforcement learning on a CPU, by SGLang's engine: rollouts with DSPARK, a reward, an update, new weights.

    python benchmarks/rollouts.py --target T --draft D --output rollouts.json

The target learns to answer sums: it samples a group of answers to each at temperature 1, an answer with the right
number at its end earns 1, and a policy gradient follows what beats its group. The drafter stays as it is. Each round
reports reward, accept length and where drafts came from, by version of the weights. After the last one, first tokens
are sampled by turns with speculation and without it, and compared by a chi-square test. Its power is that to notice a
distribution at a total-variation distance of 0.1, by simulation.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import chi2_contingency
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_dspark.tools import provenance
from sglang_dspark.tools.launch import CPU_ENV, CPU_FLAGS, dspark_flags

LEARNING_RATE, MOST_NORM = 2e-5, 1.0
ALPHA, DISTANCE, SIMULATED = 0.001, 0.1, 400
FIRST_TOKENS = 3
FLAGS = ("--dtype", "float32", "--log-level", "error")
LEAST_EXPECTED = 8  # of a text, below which rare ones count as one
SHOWN = """Q: Tom has 3 apples and buys 2 more. How many apples has he?
A: 3 + 2 = 5. Tom has 5 apples.

"""
SUMS = (
    "Q: Anna has {a} coins and finds {b} more. How many coins has she?\nA:",
    "Q: There are {a} people on a bus, and {b} more get on. How many people are there?\nA:",
)

Answer = dict[str, Any]


def sums(tokenizer: Any, number: int, draw: random.Random) -> list[tuple[list[int], int]]:
    """Return questions behind answered ones, as token ids, with their results."""
    asked = []
    for _ in range(number):
        a, b = draw.randrange(1, 10), draw.randrange(1, 10)
        asked.append((tokenizer(SHOWN + draw.choice(SUMS).format(a=a, b=b))["input_ids"], a + b))
    return asked


def reward(text: str, result: int) -> float:
    """Return 1 if the last number of a text's first line is the result."""
    numbers = re.findall(r"\d+", text.strip().partition("\n")[0])
    return float(bool(numbers) and int(numbers[-1]) == result)


def rollouts(engine: Any, prompts: Sequence[list[int]], group: int, **parameters: Any) -> list[list[Answer]]:
    """Return a group of sampled answers to each prompt."""
    asked = [prompt for prompt in prompts for _ in range(group)]
    answers = engine.generate(input_ids=asked, sampling_params={"temperature": 1.0, "stop": ["\n"], **parameters})
    return [answers[first : first + group] for first in range(0, len(answers), group)]


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


def send(engine: Any, model: Any, version: int) -> None:
    """Give the engine the weights, as trainers of the framework do.

    Raises:
        RuntimeError: the engine has not taken them.
    """
    named = [(name, tensor.detach()) for name, tensor in model.state_dict().items() if name != "lm_head.weight"]
    for success, message in (
        engine.begin_weight_update(selector="target"),
        engine.update_weights_from_tensor(named),
        engine.end_weight_update(),
    ):
        if not success:
            raise RuntimeError(f"version {version} of the weights was not taken: {message}")


def speculation(answers: Sequence[Answer]) -> dict[str, float]:
    """Return what became of the drafts of these answers; those that were verified and not drafted are copies."""
    infos = [counts for answer in answers if (counts := answer["meta_info"].get("dspark"))]
    names = ("rounds", "drafted_tokens", "verified_tokens", "accepted_tokens")
    total = {name: sum(info[name] for info in infos) for name in names}
    return {**total, "accept_length": round(1 + total["accepted_tokens"] / max(1, total["rounds"]), 3)}


def alike(*samples: Counter[tuple[int, ...]]) -> float:
    """Return the p-value of a chi-square test of homogeneity; rare texts count as one."""
    common = [text for text, count in (samples[0] + samples[1]).items() if count >= 2 * LEAST_EXPECTED]
    rows = [[sample[text] for text in common] + [sample.total() - sum(sample[t] for t in common)] for sample in samples]
    columns = [column for column in zip(*rows, strict=True) if sum(column) > 0]
    return float(chi2_contingency(list(zip(*columns, strict=True))).pvalue)


def power(sample: Counter[tuple[int, ...]], draw: np.random.Generator) -> float:
    """Return how often the test notices that a tenth of the mass lies on other texts, at as many samples."""
    texts = [text for text, _ in sample.most_common()]
    usual = np.array([sample[text] for text in texts]) / sample.total()
    moved = DISTANCE if usual[0] < 0.5 else -DISTANCE  # to the likeliest one, or from it
    other = (1 - moved / (1 - usual[0])) * usual
    other[0] = usual[0] + moved
    drawn = [
        [
            Counter(dict(zip(texts, draw.multinomial(sample.total(), law).tolist(), strict=True)))
            for law in (usual, other)
        ]
        for _ in range(SIMULATED)
    ]
    return sum(alike(*pair) < ALPHA for pair in drawn) / SIMULATED


def compare(engine: Any, prompt: list[int], number: int) -> dict[str, Any]:
    """Compare first tokens that are sampled with speculation and without it."""
    counts: dict[bool, Counter[tuple[int, ...]]] = {True: Counter(), False: Counter()}
    batch = 16
    for first in range(0, 2 * number, batch):
        speculates = first // batch % 2 == 0
        fields = {"max_new_tokens": FIRST_TOKENS, "custom_params": {"dspark": {"enabled": speculates}}}
        [answers] = rollouts(engine, [prompt], batch, ignore_eos=True, **fields)
        counts[speculates].update(tuple(answer["output_ids"]) for answer in answers)
    found = power(counts[False], np.random.default_rng(0))
    return {
        "samples": counts[True].total(),
        "texts": len(counts[True] + counts[False]),
        "p_value": round(alike(counts[True], counts[False]), 4),
        "alpha": ALPHA,
        "power_at_distance_0.1": found,
    }


@click.command()
@click.option("--target", required=True, help="Folder of the target.")
@click.option("--draft", required=True, help="Folder of the drafter.")
@click.option("--rounds", default=4, help="Updates.")
@click.option("--prompts", default=8, help="Sums in each round.")
@click.option("--group", default=8, help="Answers to each.")
@click.option("--max-tokens", default=24, help="Of an answer.")
@click.option("--samples", default=1024, help="For the comparison, of each kind.")
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
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang import Engine  # only now does it know the flags of the plugin
    from sglang.srt.server_args import prepare_server_args

    tokenizer = AutoTokenizer.from_pretrained(target)
    words = ("--model-path", target, *dspark_flags(draft), *CPU_FLAGS, *FLAGS, *flags)
    engine = Engine(server_args=prepare_server_args([str(word) for word in words]))
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    optimizer, draw, rows = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE), random.Random(0), []
    for version in range(rounds + 1):
        asked = sums(tokenizer, prompts, draw)
        groups = rollouts(engine, [prompt for prompt, _ in asked], group, max_new_tokens=max_tokens)
        earned = [
            np.array([reward(tokenizer.decode(answer["output_ids"]), result) for answer in answers])
            for (_, result), answers in zip(asked, groups, strict=True)
        ]
        row: Mapping[str, Any] = {"version": version, "reward": round(float(np.mean(earned)), 3)}
        rows.append({**row, **speculation([answer for answers in groups for answer in answers])})
        click.echo(json.dumps(rows[-1]))
        if version < rounds:
            taught = [
                (prompt, *pair) for (prompt, _), pair in zip(asked, zip(groups, earned, strict=True), strict=True)
            ]
            rows[-1]["gradient_norm"] = round(learn(model, optimizer, taught), 3)
            send(engine, model, version + 1)
    found = {**provenance.record(), "rounds": rows}
    provenance.write_json(output, found)  # the comparison takes longer than a round
    compared = compare(engine, sums(tokenizer, 1, draw)[0][0], samples)
    click.echo(json.dumps(compared))
    engine.shutdown()
    provenance.write_json(output, {**found, "with_and_without_speculation": compared})


if __name__ == "__main__":
    main()
