r"""Everything that needs an NVIDIA GPU, in the order in which a short time on one is best spent.

    python benchmarks/gpu.py --target TARGET --draft DRAFT --prompts PROMPTS.jsonl --output RESULTS
    python benchmarks/gpu.py ... --only ttft,sweep --builtin-python OTHER_ENV/bin/python
    python benchmarks/gpu.py ... --rehearse

The parts are commands of this folder, one after another, each with a limit of its own; those that run unasked are
meant to take 25 minutes. A part that fails or takes too long stops no other. RESULTS gets what each makes, a log of
each, and ``order.json``: commands, seconds, and how they ended. What has ended well at this commit is not run again.

Plain servers run as SGLang configures itself. ``--builtin-python`` is an interpreter whose SGLang has a DSPARK of its
own, which is then measured as well; of the random pair it keeps as many drafts as ours, by SGLang's own simulation.

``--rehearse`` runs the same commands on a CPU with few tokens, and a small shape in place of the large one: whether
they work, not how fast. What a CPU cannot run is collected only.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from shape_pair import ACCEPTANCE, SHAPES, write_pair

from sglang_dspark.tools import provenance

EXISTING = click.Path(exists=True, resolve_path=True)
ROOT = Path(__file__).resolve().parents[1]
NO_PREFILL_GRAPHS = "--disable-prefill-cuda-graph"
SERVED = "--max-running-requests 64 --cuda-graph-max-bs-decode 64"
# By servers that are loaded at once: each gets so much of the GPU's memory.
MEMORY = {2: f"{SERVED} --mem-fraction-static 0.4", 4: f"{SERVED} --mem-fraction-static 0.2"}
POLICIES = ("plain", "off", "auto", "static:5")
CONTEXTS = (100, 4000)  # tokens, and letters: the tokenizer of a shape has one for each
KEPT = ACCEPTANCE["mixed"]
STOPPED = "stopped at its limit"


@dataclass(frozen=True)
class Setting:
    """What all parts are told.

    Attributes:
        pair: arguments that name target, draft and prompts.
        output: folder of the results.
        builtin_python: interpreter with SGLang's own DSPARK; None leaves that out.
        rehearses: on a CPU, with few tokens.
    """

    pair: tuple[str, ...]
    output: Path
    builtin_python: str | None
    rehearses: bool

    def run(self, script: str, *words: str, output: str) -> list[str]:
        """A script of this folder on the device, with its results in ``output``."""
        device = "cpu" if self.rehearses else "cuda"
        return [*_script(script), *words, "--device", device, "--output", str(self.output / output)]

    def sweep(
        self, output: str, what: Sequence[str], configs: Sequence[str], users: str, flags: str, **numbers: int
    ) -> list[str]:
        """A sweep; ``numbers``: prompts, tokens of an answer and rounds, of which a rehearsal has few."""
        if self.rehearses:
            users, numbers = "1,2", {"num_prompts": 2, "max_tokens": 6, "rounds": 1}
        words = [*what, *_each("--config", configs), "--concurrency", users, f"--server-flags={flags}"]
        words += [f"--{name.replace('_', '-')}={number}" for name, number in numbers.items()]
        if self.builtin_python is not None:
            words += ["--builtin-python", self.builtin_python]
        return self.run("sweep_concurrency.py", *words, output=output)

    def builtin(self, *variables: str) -> tuple[str, ...]:
        """The configuration of SGLang's own DSPARK, where it is measured."""
        return () if self.builtin_python is None else (" ".join(("builtin", *variables)),)


Commands = list[list[str]]


@dataclass(frozen=True)
class Part:
    """Some commands that answer a question.

    Attributes:
        question: what they answer.
        minutes: after which they are stopped.
        commands: made from the setting.
        unasked: whether the part runs when none is named.
    """

    question: str
    minutes: float
    commands: Callable[[Setting], Commands]
    unasked: bool = True


def ttft(setting: Setting) -> Commands:
    """Prefill in SGLang's graphs and without. Equal accept lengths say that the drafter reads the same states."""
    configs = (
        "plain",
        f"plain-eager=plain {NO_PREFILL_GRAPHS}",
        "static:5",
        f"static5-eager=static:5 {NO_PREFILL_GRAPHS}",
    )
    numbers = {"num_prompts": 32, "max_tokens": 32, "rounds": 4}
    return [setting.sweep("ttft", [*setting.pair, "--ignore-eos"], configs, "1,16", MEMORY[4], **numbers)]


def identity(setting: Setting) -> Commands:
    """Texts against the target's alone, and what a served step launches and waits for."""
    if setting.rehearses:
        few = ("--num-prompts", "2", "--max-tokens", "6", "--only", "auto, 1 user")
        return [setting.run("identity.py", *setting.pair, *few, output="identity.json")]
    texts = ("--dtype", "bfloat16", "--num-prompts", "32")
    return [
        setting.run("identity.py", *setting.pair, *texts, output="identity.json"),
        _pytest("tests/gpu/test_served_step.py"),
    ]


def sweep(setting: Setting) -> Commands:
    """The pair at 1 to 64 users, answers of natural length, against SGLang as it configures itself."""
    configs, numbers = (*POLICIES, *setting.builtin()), {"num_prompts": 24, "max_tokens": 256, "rounds": 4}
    measured = setting.sweep("sweep", setting.pair, configs, "1,4,16,64", MEMORY[4], **numbers)
    return [measured, [*_script("report.py"), str(setting.output / "sweep")]]


def trace(setting: Setting) -> Commands:
    """What a decode step of 1 and of 64 users is made of."""
    more = ("--steps", "4") if setting.rehearses else (f"--server-flags={MEMORY[2]}",)
    words = (*setting.pair, "--config", "static:5", *more)
    users = ("1", "2") if setting.rehearses else ("1", "64")
    left = [n for n in users if not (setting.output / f"trace_{n}" / "trace.json.gz").exists()]
    return [setting.run("step_trace.py", "record", *words, "--concurrency", n, output=f"trace_{n}") for n in left]


def shape(setting: Setting) -> Commands:
    """Steps of Qwen3-8B's shape with drafts kept by chance, at short and at long contexts."""
    pair = setting.output / "shape"
    write_pair(SHAPES["rehearsal" if setting.rehearses else "qwen3-8b"], pair)
    simulated = f"--speculative-dspark-simulate-acceptance {','.join(map(str, KEPT))}"
    named = (("off", "off"), ("auto", "auto"), ("static7", "static:7"))
    ours = ("plain", *(f"{name}={policy} {simulated}" for name, policy in named))
    builtin = setting.builtin(f"SGLANG_SIMULATE_ACC_LEN={1 + sum(accumulate(KEPT, mul)):.2f}")
    numbers = {"num_prompts": 8, "max_tokens": 128, "rounds": 3}
    commands = []
    for context in CONTEXTS:
        prompts = pair / f"context_{context}.jsonl"
        _write_prompts(prompts, context)
        what = ["--target", str(pair / "target"), "--draft", str(pair / "draft"), "--prompts", str(prompts)]
        what += ["--raw-prompts", "--ignore-eos"]
        # At first without SGLang's own: three servers with so much context do not fit one GPU.
        for configs in dict.fromkeys((ours, (*ours, *builtin))):
            flags = f"--load-format dummy {'' if setting.rehearses else MEMORY[2]}"
            commands.append(setting.sweep(f"shape_{context}", what, configs, "1,8,64", flags, **numbers))
    return commands


def kernels(setting: Setting) -> Commands:
    """Time of every kernel, and whether it gives what its torch form gives."""
    tests = _pytest("tests/kernels", "tests/draft/test_fused_layer.py")
    if setting.rehearses:
        return [[*tests, "--collect-only"]]
    return [[*_script("kernels/run.py"), "--quick", "--output", str(setting.output / "kernels.json")], tests]


def turns(setting: Setting) -> Commands:
    """Policies that take turns of a few steps on the same texts."""
    users, rounds, tokens = ("1", "1", "48") if setting.rehearses else ("1,4,16,64", "10", "2000")
    configs = ("auto", *(f"static:{length}" for length in range(1, 6)))
    words = [*_each("--config", configs), "--concurrency", users, "--rounds", rounds, "--seconds", "0.05"]
    words += ["--max-tokens", tokens, *([] if setting.rehearses else [f"--server-flags={MEMORY[2]}"])]
    return [setting.run("policy_turns.py", *setting.pair, *words, output="turns")]


def tests(setting: Setting) -> Commands:
    """All tests that wait for a GPU."""
    return [_pytest("tests/gpu", *(["--collect-only"] if setting.rehearses else []))]


PARTS: Mapping[str, Part] = {
    "ttft": Part("does the first token come as soon as with SGLang alone?", 4, ttft),
    "identity": Part("are the texts the target's?", 5, identity),
    "sweep": Part("is it faster than SGLang at every load?", 5, sweep),
    "trace": Part("what is a step made of?", 3, trace),
    "shape": Part("and with a target of 8 billion parameters?", 10, shape),
    "kernels": Part("are the kernels right, and how fast?", 4, kernels),
    "turns": Part("which policy decodes fastest?", 15, turns, unasked=False),
    "tests": Part("does everything else run that was written for a GPU?", 30, tests, unasked=False),
}


def run_part(name: str, setting: Setting) -> dict[str, Any]:
    """Run a part to its end or limit.

    Returns:
        Its entry in ``order.json``.
    """
    part, began, status = PARTS[name], time.monotonic(), "ok"
    commands = part.commands(setting)
    with (setting.output / f"{name}.log").open("w", encoding="utf-8") as log:
        for command in commands:
            status = _run(command, log, 60 * part.minutes - (time.monotonic() - began))
            if status != "ok":
                break
    shown = [[provenance.portable(word) for word in command] for command in commands]
    return {"status": status, "seconds": round(time.monotonic() - began, 1), "commands": shown}


def _run(command: list[str], log: Any, limit_s: float) -> str:
    """Run one command in a process group of its own, which is gone afterwards."""
    if limit_s <= 0:
        return STOPPED
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True) as process:
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)  # servers of ours end with it
            return STOPPED
    return "ok" if status == 0 else f"exit status {status}"


def _script(name: str) -> list[str]:
    return [sys.executable, f"benchmarks/{name}"]


def _pytest(*words: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-q", *words]


def _each(flag: str, values: Sequence[str]) -> list[str]:
    return [word for value in values for word in (flag, value)]


def _write_prompts(path: Path, length: int, number: int = 128) -> None:
    """Prompts of so many letters, no two alike: nothing of one is in the prefix cache for another."""
    rng = random.Random(length)
    texts = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=length)) for _ in range(number)]
    path.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in texts), encoding="utf-8")


def _named(context: click.Context, parameter: click.Parameter, text: str | None) -> list[str]:
    names = [name for name, part in PARTS.items() if part.unasked] if text is None else text.split(",")
    for name in names:
        if name not in PARTS:
            raise click.BadParameter(f"{name!r} is none of {', '.join(PARTS)}")
    return names


@click.command(help=__doc__)
@click.option("--target", required=True, type=EXISTING)
@click.option("--draft", required=True, type=EXISTING)
@click.option("--prompts", required=True, multiple=True, type=EXISTING)
@click.option("--output", required=True, type=click.Path(file_okay=False, path_type=Path), help="Folder for results.")
@click.option("--only", "names", callback=_named, metavar="PART,...", help=f"Of {', '.join(PARTS)}.")
@click.option("--builtin-python", help="Interpreter of an environment whose SGLang has a DSPARK of its own.")
@click.option("--rehearse", is_flag=True, help="On a CPU, with few tokens.")
def main(
    target: str,
    draft: str,
    prompts: tuple[str, ...],
    output: Path,
    names: list[str],
    builtin_python: str | None,
    rehearse: bool,
) -> None:
    """Command line; see the module."""
    console = Console(highlight=False, soft_wrap=True)
    if rehearse and builtin_python is not None:
        raise click.UsageError("SGLang's own DSPARK needs a GPU; rehearse without --builtin-python")
    pair = ("--target", target, "--draft", draft, *_each("--prompts", prompts))
    setting = Setting(pair, output.resolve(), builtin_python, rehearse)
    output.mkdir(parents=True, exist_ok=True)
    path = output / "order.json"
    now = provenance.record()
    done = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    parts: dict[str, Any] = done["parts"] if done.get("commit") == now["commit"] else {}
    for name in names:
        if parts.get(name, {}).get("status") == "ok":
            console.print(f"{name}: done before")
            continue
        console.print(f"{name}: {PARTS[name].question} At most {PARTS[name].minutes:g} minutes.")
        parts[name] = run_part(name, setting)
        provenance.write_json(path, {**now, "rehearsal": rehearse, "parts": parts})
        console.print(f"{name}: {parts[name]['status']}, {parts[name]['seconds']:.0f} s; {output / name}.log")
    sys.exit(0 if all(parts[name]["status"] == "ok" for name in names) else 1)


if __name__ == "__main__":
    main()
