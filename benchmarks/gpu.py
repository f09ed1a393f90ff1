r"""Run all that needs an NVIDIA GPU, in the order in which a short time on one is best spent.

    python benchmarks/gpu.py --target TARGET --draft DRAFT --prompts PROMPTS.jsonl --output RESULTS
    python benchmarks/gpu.py ... --only trace,sweep --builtin

The parts are commands of this folder, one after another, each part with a limit; those that run unasked have 33 minutes
together. What fails or takes too long stops nothing else. RESULTS gets a folder and a log of each part, and
``order.json``: commands, seconds, and how it ended. A part that has ended well is not run again with the same code and
arguments; a sweep that was stopped goes on. Of other code or arguments, choose another folder.

Plain servers run as SGLang configures itself. With ``--builtin`` SGLang's own worker is measured as well, as it comes
and by our schedule; of the random pair it keeps as many drafts as ours, by SGLang's own simulation.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from shape_pair import ACCEPTANCE

from sglang_dspark.tools import provenance
from sglang_dspark.tools.launch import dspark_flags

EXISTING = click.Path(exists=True, resolve_path=True)
ROOT = Path(__file__).resolve().parents[1]
SERVED = "--max-running-requests 64 --cuda-graph-max-bs-decode 64"
# Of what is free when a server starts. Up to four share the GPU, and all of them have the same room for K/V.
SMALL = f"{SERVED} --mem-fraction-static 0.25 --max-total-tokens 65536"
LARGE = f"{SERVED} --mem-fraction-static 0.8 --max-total-tokens 160000 --load-format dummy"
POLICIES = ("plain", "off", "auto", "static:5")
SCHEDULED = (
    "scheduled=auto SGLANG_DSPARK_ENGINE=scheduled",  # each request its own number of drafts, where SGLang can do that
    "widths=auto SGLANG_DSPARK_ENGINE=scheduled SGLANG_RAGGED_VERIFY_MODE=static",
)
# Of a shape, by tokens of context, which are letters: users, and what a sweep is told. A short answer to a long prompt
# would show its prefill, and 64 of these would not fit.
CONTEXTS: Mapping[int, tuple[str, Mapping[str, float]]] = {
    # Of equal lengths, answers of servers that keep equally many drafts of all requests would end together.
    100: ("1,8,64", {"num_prompts": 2, "max_tokens": 128, "rounds": 4, "spread": 0.75}),
    4000: ("1,8,32", {"num_prompts": 2, "max_tokens": 256, "rounds": 2}),
}
KEPT = ACCEPTANCE["mixed"]
STOPPED = "stopped at its limit"
READER, READING_S = "benchmarks/report.py", 60  # for what shows a sweep, also one that was stopped


@dataclass(frozen=True)
class Setting:
    """The arguments of all parts.

    Attributes:
        pair: arguments that name target, draft and prompts.
        output: folder of the part's results.
        with_builtin: measure SGLang's own worker as well.
    """

    pair: tuple[str, ...]
    output: Path
    with_builtin: bool

    def run(self, script: str, *words: str, output: str) -> list[str]:
        """Return the command of a script of this folder on the GPU, with its results in ``output``."""
        return [*_script(script), *words, "--device", "cuda", "--output", str(self.output / output)]

    def sweep(
        self, output: str, what: Sequence[str], configs: Sequence[str], users: str, flags: str, **numbers: float
    ) -> list[str]:
        """Return a sweep; ``numbers``: prompts, tokens of an answer and rounds."""
        words = [*what, *_each("--config", configs), "--concurrency", users, f"--server-flags={flags}"]
        words += [f"--{name.replace('_', '-')}={number}" for name, number in numbers.items()]
        return self.run("sweep_concurrency.py", *words, output=output)

    def builtin(self, *variables: str) -> tuple[str, ...]:
        """Return the configuration of SGLang's own worker, where it is measured."""
        return (" ".join(("builtin", *variables)),) if self.with_builtin else ()


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


def start(setting: Setting) -> Commands:
    """Serve the shape of a usual target with no flag of memory or backend, as in the README."""
    pair = setting.output / "pair"
    what = [*_named_pair(pair), "--prompts", str(pair / "context_100.jsonl"), "--ignore-eos"]
    numbers = {"num_prompts": 2, "max_tokens": 32, "rounds": 1}
    return [_made(pair, 100), setting.sweep("", what, ("auto",), "1", "--load-format dummy", **numbers)]


def identity(setting: Setting) -> Commands:
    """Compare texts with the target's alone, and see what a served step launches and waits for."""
    texts = ("--dtype", "bfloat16", "--num-prompts", "32", "--only", "user")  # the scenarios of one server
    return [
        setting.run("identity.py", *setting.pair, *texts, output="identity.json"),
        _module("pytest", "-q", "tests/gpu/test_served_step.py"),
    ]


def sweep(setting: Setting) -> Commands:
    """Measure the pair at 1 to 64 users, answers of natural length, against SGLang as it configures itself."""
    configs, numbers = (*POLICIES, *setting.builtin()), {"num_prompts": 12, "max_tokens": 256, "rounds": 4}
    if setting.with_builtin:
        configs += SCHEDULED
    return [setting.sweep("", setting.pair, configs, "1,4,16,64", SMALL, **numbers), _report(setting.output)]


def trace(setting: Setting) -> Commands:
    """Return what a decode step of 1 and of 64 users is made of."""
    target, draft = (setting.pair[setting.pair.index(name) + 1] for name in ("--target", "--draft"))
    served = ["--model-path", target, *dspark_flags(draft), "--speculative-dspark-schedule", "static", *SMALL.split()]
    sizes = ["--batch-size", "1", "64", "--input-len", "100", "--output-len", "1024"]
    recorded = ["--profile", "--profile-steps", "36", "--profile-output-dir", str(setting.output)]
    command = _module("sglang.benchmark.one_batch_server", *served, *sizes, *recorded)
    return [command, [*_script("step_trace.py"), str(setting.output)]]


def shape(setting: Setting) -> Commands:
    """Measure steps of Qwen3-8B's shape with drafts kept by chance, at short and at long contexts.

    With long ones look at ``itl_p50_ms`` and ``accept_length``: prefills are most of the rest.
    """
    pair = setting.output / "pair"
    simulated = f"--speculative-dspark-simulate-acceptance {','.join(map(str, KEPT))}"
    named = (("off", "off"), ("auto", "auto"), ("static7", "static:7"))
    ours = ("plain", *(f"{name}={policy} {simulated}" for name, policy in named))
    builtin = setting.builtin(f"SGLANG_SIMULATE_ACC_LEN={1 + sum(accumulate(KEPT, mul)):.2f}")
    commands, what = [_made(pair, *CONTEXTS)], [*_named_pair(pair), "--ignore-eos"]
    # SGLang's own afterwards: three servers do not fit one GPU, and a sweep starts those that it has not measured.
    for configs in dict.fromkeys((ours, (*ours, *builtin))):
        for context, (users, numbers) in CONTEXTS.items():
            prompts = ["--prompts", str(pair / f"context_{context}.jsonl")]
            commands.append(setting.sweep(f"context_{context}", [*what, *prompts], configs, users, LARGE, **numbers))
    return [*commands, *(_report(setting.output / f"context_{context}") for context in CONTEXTS)]


def kernels(setting: Setting) -> Commands:
    """Test whether every kernel gives what its torch form gives."""
    return [_module("pytest", "-q", "tests/kernels", "tests/draft/test_fused_layer.py")]


def turns(setting: Setting) -> Commands:
    """Let policies take turns of a few steps on the same texts."""
    words = [*_each("--config", ("auto", *(f"static:{length}" for length in range(1, 6))))]
    words += ["--concurrency", "1,4,16,64", "--rounds", "10", "--seconds", "0.05", "--max-tokens", "2000"]
    return [setting.run("policy_turns.py", *setting.pair, *words, f"--server-flags={SMALL}", output="turns")]


def tests(setting: Setting) -> Commands:
    """Run all tests that wait for a GPU."""
    return [_module("pytest", "-q", "tests/gpu")]


PARTS: Mapping[str, Part] = {
    "start": Part("does a server start that is told nothing but its pair?", 4, start),
    "identity": Part("are the texts the target's?", 5, identity),
    "sweep": Part("is it faster than SGLang at every load?", 5, sweep),
    "trace": Part("what is a step made of?", 3, trace),
    "shape": Part("and with a target of 8 billion parameters?", 12, shape),
    "kernels": Part("are the kernels right?", 4, kernels),
    "turns": Part("which policy decodes fastest?", 15, turns, unasked=False),
    "tests": Part("does everything else run that was written for a GPU?", 30, tests, unasked=False),
}


def run_part(commands: Commands, minutes: float, log_path: Path) -> dict[str, Any]:
    """Run a part to its end or limit: how the first command ended that did not end well, and the seconds of all."""
    began, ended = time.monotonic(), []
    with log_path.open("a", encoding="utf-8") as log:
        for command in commands:
            left_s = 60 * minutes - (time.monotonic() - began)
            ended.append(_run(command, log, max(left_s, READING_S) if command[1] == READER else left_s))
    status = next((status for status in ended if status != "ok"), "ok")
    return {"status": status, "seconds": round(time.monotonic() - began, 1)}


def _run(command: list[str], log: Any, limit_s: float) -> str:
    """Run one command, and end what it leaves behind; our servers end with the process that started them."""
    if limit_s <= 0:
        return STOPPED
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True) as process:
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return STOPPED
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return "ok" if status == 0 else f"exit status {status}"


def _made(pair: Path, *contexts: int) -> list[str]:
    """Return what makes a random pair of the shape of a usual target, with prompts of so many tokens."""
    words = ["--shape", "qwen3-8b", *_each("--context", list(map(str, contexts)))]
    return [*_script("shape_pair.py"), *words, "--output", str(pair)]


def _named_pair(pair: Path) -> list[str]:
    return ["--target", str(pair / "target"), "--draft", str(pair / "draft"), "--raw-prompts"]


def _script(name: str) -> list[str]:
    return [sys.executable, f"benchmarks/{name}"]


def _report(sweep: Path) -> list[str]:
    return [*_script("report.py"), str(sweep)]


def _module(name: str, *words: str) -> list[str]:
    return [sys.executable, "-m", name, *words]


def _each(flag: str, values: Sequence[str]) -> list[str]:
    return [word for value in values for word in (flag, value)]


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
@click.option("--builtin", is_flag=True, help="Measure SGLang's own worker as well, as it comes and by our schedule.")
def main(target: str, draft: str, prompts: tuple[str, ...], output: Path, names: list[str], builtin: bool) -> None:
    """Command line; see the module."""
    console = Console(highlight=False, soft_wrap=True)
    # Python ends on SIGTERM without unwinding, which would leave the servers of a part behind.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    pair, output = ("--target", target, "--draft", draft, *_each("--prompts", prompts)), output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    path = output / "order.json"
    parts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    made = {**provenance.record(), "changes": provenance.changes_digest()}
    for name in names:
        part, folder = PARTS[name], output / name
        commands = part.commands(Setting(pair, folder, builtin))
        terms = {"commit": made["commit"], "changes": made["changes"], "commands": _portable(commands)}
        before = parts.get(name, {})
        if terms.items() <= before.items() and before["status"] == "ok":
            console.print(f"{name}: done before")
            continue
        folder.mkdir(exist_ok=True)
        console.print(f"{name}: {part.question} At most {part.minutes:g} minutes.")
        # Before it runs: what is ended from outside goes on all the same.
        parts[name] = {**made, **terms, "status": "running", "seconds": None}
        provenance.write_json(path, parts)
        parts[name] |= run_part(commands, part.minutes, output / f"{name}.log")
        provenance.write_json(path, parts)
        console.print(f"{name}: {parts[name]['status']}, {parts[name]['seconds']:.0f} s; {output / name}.log")
    sys.exit(0 if all(parts[name]["status"] == "ok" for name in names) else 1)


def _portable(commands: Commands) -> Commands:
    return [[provenance.portable(word) for word in command] for command in commands]


if __name__ == "__main__":
    main()
