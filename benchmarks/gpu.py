r"""What needs an NVIDIA GPU, in the order in which a short time on one is best spent.

    python benchmarks/gpu.py --target TARGET --draft DRAFT --prompts PROMPTS.jsonl --output RESULTS
    python benchmarks/gpu.py ... --only ttft,sweep --builtin-python OTHER_ENV/bin/python
    python benchmarks/gpu.py ... --rehearse

The parts are commands of this folder, one after another, each with a limit of its own; those that run unasked are
meant to take 25 minutes, and take 35 at most. A part that fails or takes too long stops no other. RESULTS gets a folder
and a log of each, and ``order.json``: commands, seconds, and how they ended. A part that has ended well is not run
again with the same code and arguments; a sweep that was stopped goes on.

Plain servers run as SGLang configures itself. ``--builtin-python`` is an interpreter whose SGLang has a DSPARK of its
own, which is then measured as well; of the random pair it keeps as many drafts as ours, by SGLang's own simulation.

``--rehearse`` runs the same commands on a CPU with few tokens, and a small shape in place of the large one: whether
they work, not how fast. What a CPU cannot run is collected or compiled only.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
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
from shape_pair import ACCEPTANCE

from sglang_dspark.errors import DSparkError
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
GRACE_S = 10  # for a part that is told to end
PATIENCE = 4  # of a rehearsal: servers start slowly on a CPU


@dataclass(frozen=True)
class Setting:
    """What all parts are told.

    Attributes:
        pair: arguments that name target, draft and prompts.
        output: folder of the part's results.
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
        resumes: whether a part that was stopped goes on with what it has left behind.
    """

    question: str
    minutes: float
    commands: Callable[[Setting], Commands]
    unasked: bool = True
    resumes: bool = False


def ttft(setting: Setting) -> Commands:
    """Prefill in SGLang's graphs and without. Equal accept lengths say that the drafter reads the same states."""
    configs = (
        "plain",
        f"plain-eager=plain {NO_PREFILL_GRAPHS}",
        "static:5",
        f"static5-eager=static:5 {NO_PREFILL_GRAPHS}",
    )
    numbers = {"num_prompts": 32, "max_tokens": 32, "rounds": 4}
    return [setting.sweep("", [*setting.pair, "--ignore-eos"], configs, "1,16", MEMORY[4], **numbers)]


def identity(setting: Setting) -> Commands:
    """Texts against the target's alone, and what a served step launches and waits for."""
    if setting.rehearses:
        few = ("--num-prompts", "2", "--max-tokens", "6", "--only", "auto, 1 user")
        return [setting.run("identity.py", *setting.pair, *few, output="identity.json")]
    texts = ("--dtype", "bfloat16", "--num-prompts", "32", "--only", "user")  # the scenarios of one server
    return [
        setting.run("identity.py", *setting.pair, *texts, output="identity.json"),
        _pytest("tests/gpu/test_served_step.py"),
    ]


def sweep(setting: Setting) -> Commands:
    """The pair at 1 to 64 users, answers of natural length, against SGLang as it configures itself."""
    configs, numbers = (*POLICIES, *setting.builtin()), {"num_prompts": 24, "max_tokens": 256, "rounds": 4}
    measured = setting.sweep("", setting.pair, configs, "1,4,16,64", MEMORY[4], **numbers)
    return [measured, [*_script("report.py"), str(setting.output)]]


def trace(setting: Setting) -> Commands:
    """What a decode step of 1 and of 64 users is made of."""
    more = ("--steps", "4") if setting.rehearses else (f"--server-flags={MEMORY[2]}",)
    words = (*setting.pair, "--config", "static:5", *more)
    users = ("1", "2") if setting.rehearses else ("1", "64")
    return [setting.run("step_trace.py", "record", *words, "--concurrency", n, output=f"{n}_users") for n in users]


def shape(setting: Setting) -> Commands:
    """Steps of Qwen3-8B's shape with drafts kept by chance, at short and at long contexts."""
    pair, named_shape = setting.output / "pair", "rehearsal" if setting.rehearses else "qwen3-8b"
    simulated = f"--speculative-dspark-simulate-acceptance {','.join(map(str, KEPT))}"
    named = (("off", "off"), ("auto", "auto"), ("static7", "static:7"))
    ours = ("plain", *(f"{name}={policy} {simulated}" for name, policy in named))
    builtin = setting.builtin(f"SGLANG_SIMULATE_ACC_LEN={1 + sum(accumulate(KEPT, mul)):.2f}")
    numbers = {"num_prompts": 2, "max_tokens": 64, "rounds": 4}
    contexts = _each("--context", list(map(str, CONTEXTS)))
    commands = [[*_script("shape_pair.py"), "--shape", named_shape, *contexts, "--output", str(pair)]]
    for context in CONTEXTS:
        what = ["--target", str(pair / "target"), "--draft", str(pair / "draft"), "--raw-prompts", "--ignore-eos"]
        what += ["--prompts", str(pair / f"context_{context}.jsonl")]
        # At first without SGLang's own: three servers with so much context do not fit one GPU.
        for configs in dict.fromkeys((ours, (*ours, *builtin))):
            flags = f"--load-format dummy {'' if setting.rehearses else MEMORY[2]}"
            commands.append(setting.sweep(f"context_{context}", what, configs, "1,8,64", flags, **numbers))
    return commands


def kernels(setting: Setting) -> Commands:
    """Time of every kernel, and whether it gives what its torch form gives."""
    tests = _pytest("tests/kernels", "tests/draft/test_fused_layer.py")
    if setting.rehearses:
        return [[*tests, "--collect-only"]]
    return [[*_script("kernels/run.py"), "--quick", "--output", str(setting.output / "kernels.json")], tests]


def turns(setting: Setting) -> Commands:
    """Policies that take turns of a few steps on the same texts."""
    users, rounds, tokens = ("1", "1", "200") if setting.rehearses else ("1,4,16,64", "10", "2000")
    configs = ("auto", *(f"static:{length}" for length in ((3,) if setting.rehearses else range(1, 6))))
    words = [*_each("--config", configs), "--concurrency", users, "--rounds", rounds, "--seconds", "0.05"]
    words += ["--max-tokens", tokens, *([] if setting.rehearses else [f"--server-flags={MEMORY[2]}"])]
    return [setting.run("policy_turns.py", *setting.pair, *words, output="turns")]


def tests(setting: Setting) -> Commands:
    """All tests that wait for a GPU."""
    # Without one they are not even collected.
    return [[sys.executable, "-m", "compileall", "-q", "tests/gpu"] if setting.rehearses else _pytest("tests/gpu")]


PARTS: Mapping[str, Part] = {
    "ttft": Part("does the first token come as soon as with SGLang alone?", 6, ttft, resumes=True),
    "identity": Part("are the texts the target's?", 5, identity),
    "sweep": Part("is it faster than SGLang at every load?", 5, sweep, resumes=True),
    "trace": Part("what is a step made of?", 3, trace),
    "shape": Part("and with a target of 8 billion parameters?", 12, shape, resumes=True),
    "kernels": Part("are the kernels right, and how fast?", 4, kernels),
    "turns": Part("which policy decodes fastest?", 15, turns, unasked=False),
    "tests": Part("does everything else run that was written for a GPU?", 30, tests, unasked=False),
}


def run_part(commands: Commands, minutes: float, log_path: Path) -> dict[str, Any]:
    """Run a part to its end or limit: how it ended, and after how many seconds."""
    began, status = time.monotonic(), "ok"
    with log_path.open("w", encoding="utf-8") as log:
        for command in commands:
            status = _run(command, log, 60 * minutes - (time.monotonic() - began))
            if status != "ok":
                break
    return {"status": status, "seconds": round(time.monotonic() - began, 1)}


def _run(command: list[str], log: Any, limit_s: float) -> str:
    """Run one command in a process group of its own, which is gone afterwards."""
    if limit_s <= 0:
        return STOPPED
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        status = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return STOPPED
    finally:
        _end(process)
    return "ok" if status == 0 else f"exit status {status}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a process group; servers of ours end with whoever has started them."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)


def _script(name: str) -> list[str]:
    return [sys.executable, f"benchmarks/{name}"]


def _pytest(*words: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-q", *words]


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
    # Python ends on SIGTERM without unwinding, which would leave the servers of a part behind.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if builtin_python is not None:
        if rehearse:
            raise click.UsageError("SGLang's own DSPARK needs a GPU; rehearse without --builtin-python")
        builtin_python = os.path.abspath(builtin_python)  # noqa: PTH100 - the Python of an environment is a link
        try:
            console.print(f"SGLang's own DSPARK: that of {provenance.version_in(builtin_python, 'sglang')}")
        except DSparkError as error:
            raise click.BadParameter(str(error), param_hint="--builtin-python") from error
    pair = ("--target", target, "--draft", draft, *_each("--prompts", prompts))
    output.mkdir(parents=True, exist_ok=True)
    path = output / "order.json"
    parts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    code = {**provenance.record(), "changes": provenance.changes_digest()}
    for name in names:
        part, folder = PARTS[name], output.resolve() / name
        commands = part.commands(Setting(pair, folder, builtin_python, rehearse))
        now = {"commit": code["commit"], "changes": code["changes"], "commands": _portable(commands)}
        before = parts.get(name, {})
        same = all(before.get(key) == value for key, value in now.items())
        if same and before["status"] == "ok":
            console.print(f"{name}: done before")
            continue
        if not (same and part.resumes):
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(exist_ok=True)
        minutes = part.minutes * (PATIENCE if rehearse else 1)
        console.print(f"{name}: {part.question} At most {minutes:g} minutes.")
        parts[name] = {**code, **now, **run_part(commands, minutes, output / f"{name}.log")}
        provenance.write_json(path, parts)
        console.print(f"{name}: {parts[name]['status']}, {parts[name]['seconds']:.0f} s; {output / name}.log")
    sys.exit(0 if all(parts[name]["status"] == "ok" for name in names) else 1)


def _portable(commands: Commands) -> Commands:
    return [[provenance.portable(word) for word in command] for command in commands]


if __name__ == "__main__":
    main()
