r"""Run all that needs an NVIDIA GPU, in the order in which a short time on one is best spent.

    python benchmarks/gpu.py --target TARGET --draft DRAFT --prompts PROMPTS.jsonl --output RESULTS
    python benchmarks/gpu.py ... --only chat,long,engines
    python benchmarks/gpu.py ... --only paths,prompts --rehearse

The parts are commands of this folder, one after another, each part with a limit; those that run unasked have 32 minutes
together, and each of :data:`QUARTERS` 14. What fails or takes too long stops nothing else. RESULTS gets a folder and a
log of each part, and ``order.json``: commands, seconds, and how it ended. ``open_paths.md`` says what was measured of
paths that no GPU has run (``sglang_dspark/gpu_paths.py``), and which defaults would change. A part that has ended well
is not run again with the same code and arguments; a sweep that was stopped goes on. Of other code or arguments, choose
another folder.

Plain servers run as SGLang configures itself. SGLang's own worker runs unmodified, and with the bundled pair also
under our schedule; of the random pair it keeps the drafts that ours keeps, and where both verify whole blocks, the
sweep ends if they take other steps. With ``--rehearse`` the parts of quarters but ``streams`` run on a CPU with a tiny
pair, to see that they do; SGLang's own worker then needs what the tests give it there.
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from serving.configurations import SIMULATED
from shape_pair import ACCEPTANCE
from tables import open_paths

from sglang_dspark.tools import provenance

EXISTING = click.Path(exists=True, resolve_path=True)
ROOT = Path(__file__).resolve().parents[1]
SERVED = "--max-running-requests 64 --cuda-graph-max-bs-decode 64"
# Of what is free when a server starts. Up to four share the GPU, and all of them have the same room for K/V.
SMALL = f"{SERVED} --mem-fraction-static 0.25 --max-total-tokens 65536"
# Three of these fit an H200: their K/V is bounded by tokens, not by a share of what is free when they start together.
LARGE = (
    "--load-format dummy --max-running-requests 128 --cuda-graph-max-bs-decode 128 --mem-fraction-static 0.9 "
    "--max-total-tokens 90000"
)
POLICIES = ("plain", "off", "auto", "static:5")
NAMED = (
    "scheduled=auto SGLANG_DSPARK_ENGINE=scheduled",
    "saving=auto SGLANG_MEMORY_SAVER_CUDA_GRAPH=1 --enable-memory-saver",
)
"""Paths that no GPU has run, of the bundled pair."""
MAKE_PROMPTS = "training/examples/smollm2/make_prompts.py"
TRAINED = {
    "two_layers": "--layers 2 --block-size 5",
    "three_layers": "--layers 3 --block-size 5",
    "blocks_of_7": "--layers 3 --block-size 7",
}
"""Shapes of drafters by their folders."""
RECIPE = (
    24_000,
    4000,
    (
        "--max-prompt-tokens 256 --max-tokens 256 --temperatures 0,0,0,0,0,0,0,0.7,0.7,1 --concurrency 512 "
        "--dtype bfloat16 --store-states --intermediate-size 1024 --rank 32 --taps 1,14,27 --mask-token-id 16 "
        "--loss-vocab 12288 --draft-vocabulary 12288 --batch-rows 128 --anchors 40 --learning-rate 1.5e-3 "
        "--markov-lr-scale 6 --steps 1200"
    ),
    "--limit 40 --max-tokens 128",
)
"""Prompts that are filled in and that the target invents, how to train, and how to measure."""
REHEARSED_RECIPE = (
    30,
    0,
    "--max-tokens 12 --held-out 3 --batch-rows 4 --anchors 4 --rank 8 --steps 4 --checkpoint-every 2 --device cpu",
    "--limit 2 --max-tokens 12",
)
UNPROVEN = "--speculative-dspark-unproven"
TRACED = 26
"""Decode steps of a trace."""
REHEARSED = 5
"""Times as long as on a GPU: two cores start servers slowly."""
STOPPED = "stopped at its limit"
READER, READING_S = "benchmarks/report.py", 60  # for what shows a sweep, also one that was stopped


Commands = list[list[str]]


@dataclass(frozen=True)
class Setting:
    """The arguments of all parts.

    Attributes:
        target, draft, prompts: paths.
        output: folder of the part's results.
        rehearses: on a CPU, with tiny models and few users.
    """

    target: str
    draft: str
    prompts: tuple[str, ...]
    output: Path
    rehearses: bool = False

    @property
    def pair(self) -> tuple[str, ...]:
        """Return the arguments that name the pair and its prompts."""
        return ("--target", self.target, "--draft", self.draft, *_each("--prompts", self.prompts))

    def run(self, script: str, *words: str, output: str) -> list[str]:
        """Return the command of a script of this folder, with its results in ``output``."""
        device = "cpu" if self.rehearses else "cuda"
        return [*_script(script), *words, "--device", device, "--output", str(self.output / output)]

    def sweep(self, what: Sequence[str], configs: Sequence[str], users: str, flags: str, **numbers: float) -> list[str]:
        """Return a sweep; ``numbers``: prompts, tokens of an answer and rounds."""
        if self.rehearses:
            # Two servers at a time: its memory is that of a machine that does other work.
            configs = [
                config
                for config in configs
                if "builtin" in config or SIMULATED in config or config.split("=")[-1] == "auto"
            ]
            users, numbers = "1,2", {"num_prompts": 2, "max_tokens": 40, "rounds": 2}
            # On a CPU SGLang's own worker has no kernel that writes draft K/V in 16 bits.
            what, flags = [*what, "--dtype", "float32"], "--load-format dummy"
        words = [*what, *_each("--config", configs), "--concurrency", users, f"--server-flags={flags}"]
        words += [f"--{name.replace('_', '-')}={number}" for name, number in numbers.items()]
        return self.run("sweep_concurrency.py", *words, output="")

    def made(self, context: int) -> tuple[list[str], list[str]]:
        """Return what makes a random pair of the shape of a usual target, and the arguments that name it."""
        pair, shape = self.output / "pair", "tiny" if self.rehearses else "qwen3-8b"
        words = ["--shape", shape, "--context", str(context), "--output", str(pair)]
        named = ["--target", str(pair / "target"), "--draft", str(pair / "draft"), "--raw-prompts", "--ignore-eos"]
        return [*_script("shape_pair.py"), *words], [*named, "--prompts", str(pair / f"context_{context}.jsonl")]

    def drawn(self, kind: str, context: int, configs: Sequence[str], users: str, **numbers: float) -> Commands:
        """Return the sweep of a random pair whose drafts are kept at the rates of a kind of text, with traces.

        Args:
            kind: see :data:`shape_pair.ACCEPTANCE`.
            context: tokens of a prompt.
            configs: those with ``{rates}`` keep drafts so.
        """
        making, what = self.made(12 if self.rehearses else context)
        rates = f"{SIMULATED}={','.join(map(str, ACCEPTANCE[kind]))}"
        told = [*what, "--together", f"--trace-steps={2 if self.rehearses else TRACED}"]
        swept = self.sweep(told, [config.format(rates=rates) for config in configs], users, LARGE, **numbers)
        traces = [] if self.rehearses else [[*_script("step_trace.py"), str(self.output / "traces")]]
        return [making, swept, self.report, *traces]

    @property
    def report(self) -> list[str]:
        """Return what shows the part's sweep."""
        return [*_script("report.py"), str(self.output)]


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
    making, what = setting.made(100)
    numbers = {"num_prompts": 2, "max_tokens": 32, "rounds": 1}
    return [making, setting.sweep(what, ("auto",), "1", "--load-format dummy", **numbers)]


def identity(setting: Setting) -> Commands:
    """Compare texts with those of the target alone, and see what a served step launches and waits for."""
    texts = ("--dtype", "bfloat16", "--num-prompts", "32", "--only", "user")  # the scenarios of one server
    return [
        setting.run("identity.py", *setting.pair, *texts, output="identity.json"),
        _module("pytest", "-q", "tests/gpu/test_served_step.py"),
    ]


def sweep(setting: Setting) -> Commands:
    """Measure the pair at 1 to 64 users, answers of natural length, against SGLang as it configures itself."""
    numbers = {"num_prompts": 12, "max_tokens": 256, "rounds": 4}
    return [setting.sweep(setting.pair, POLICIES, "1,4,16,64", SMALL, **numbers), setting.report]


def engines(setting: Setting) -> Commands:
    """Measure the bundled pair with our worker, with SGLang's own, and with SGLang's own under our schedule."""
    making, what = ([], setting.pair) if not setting.rehearses else setting.made(100)
    configs, numbers = (
        ("plain", "auto=auto", "builtin=builtin", *NAMED),
        {"num_prompts": 4, "max_tokens": 128, "rounds": 2},
    )
    swept = setting.sweep([*what, "--together"], configs, "1,16,64", SMALL, **numbers)
    return [*filter(None, [making]), swept, setting.report]


def equal_draws(kind: str, context: int, users: str, rounds: int) -> Callable[[Setting], Commands]:
    """Return the part that measures a shape whose drafts are kept with the same draws, whichever worker decodes."""
    configs = ("plain", "static7=static:7 {rates}", "auto=auto {rates}", "builtin=builtin {rates}")
    return lambda setting: setting.drawn(kind, context, configs, users, num_prompts=2, max_tokens=512, rounds=rounds)


def paths(setting: Setting) -> Commands:
    """Measure what is off on a GPU until a run shows that it is not slower: on servers with it and without."""
    named, eight_bits = f"{UNPROVEN} held-rows,survivals", "--speculative-dspark-draft-quantization int8"
    configs = ("off=off {rates}", "static7=static:7 {rates}", f"held=off {{rates}} {named}")
    configs += (f"survivals=static:7 {{rates}} {named}", f"int8=static:7 {{rates}} {eight_bits}")
    return setting.drawn("chat", 100, configs, "1,16,64", num_prompts=2, max_tokens=256, rounds=2)


def prompts(setting: Setting) -> Commands:
    """Measure short answers, so that prompts come often: encoded apart, verified, and verified next to drafts."""
    # A CPU verifies none unless a number says so.
    verified = "--speculative-dspark-prompt-rows 64" if setting.rehearses else f"{UNPROVEN} prompt-rows"
    configs = ("apart=auto {rates}", f"verified=auto {{rates}} {verified}")
    configs += (f"beside=auto {{rates}} --enable-mixed-chunk {verified}",)
    return setting.drawn("chat", 100, configs, "1,16,64", num_prompts=8, max_tokens=128, rounds=2)


def bits(setting: Setting) -> Commands:
    """Compare the bits of answers in many scenarios, and the speed with SGLang's deterministic mode without drafts."""
    asked, words = "--enable-deterministic-inference", ("--dtype", "bfloat16", "--num-prompts", "40")
    numbers = {"num_prompts": 4, "max_tokens": 128, "rounds": 2}
    return [
        setting.run("same_bits.py", *setting.pair, *words, f"--server-flags={asked}", output="same_bits.json"),
        setting.sweep(setting.pair, ("plain", "off", "auto"), "1,16,64", f"{SMALL} {asked}", **numbers),
        setting.report,
    ]


def streams(setting: Setting) -> Commands:
    """Test whether texts stay the same while streams are delayed at random and what was read is overwritten."""
    return [_module("pytest", "-q", "tests/gpu/test_served_step.py")]


def kernels(setting: Setting) -> Commands:
    """Test whether every kernel gives what its torch form gives."""
    return [_module("pytest", "-q", "tests/kernels", "tests/draft/test_backbone.py")]


def training(setting: Setting) -> Commands:
    """Train drafters for the bundled pair's target on the same new texts, and measure them next to the bundled one."""
    folder, (templated, invented, recipe, asked) = setting.output, REHEARSED_RECIPE if setting.rehearses else RECIPE
    made, texts = ["--target", setting.target, "--output", str(folder / "prompts.jsonl")], str(folder / "corpus")
    commands = [[*_script(MAKE_PROMPTS, ""), *made, f"--templated={templated}", f"--invented={invented}"]]
    for name, shape in {"bundled": None, **TRAINED}.items():
        draft = setting.draft if shape is None else str(folder / name / "draft")
        if shape is not None:
            told = ["--target", setting.target, "--prompts", str(folder / "prompts.jsonl"), "--corpus", texts]
            told += [*recipe.split(), *shape.split(), "--output", str(folder / name)]
            commands.append(_module("sglang_dspark", "train", *told))
        told = [*replace(setting, draft=draft).pair, *asked.split(), "--output", str(folder / f"{name}.json")]
        commands.append(_module("sglang_dspark", "evaluate", *told))
    return commands


def tests(setting: Setting) -> Commands:
    """Run all tests that wait for a GPU."""
    return [_module("pytest", "-q", "tests/gpu")]


PARTS: Mapping[str, Part] = {
    "start": Part("does a server start that is told nothing but its pair?", 4, start),
    "identity": Part("are the texts the target's?", 5, identity),
    "chat": Part("is a target of 8 billion parameters faster, on chat?", 8, equal_draws("chat", 100, "1,16,64,128", 2)),
    "long": Part("and with 4000 tokens of context?", 3, equal_draws("mixed", 4000, "8", 3)),
    "engines": Part("and the bundled pair, by three workers?", 3, engines),
    "paths": Part("is what no GPU has run slower than what it replaces?", 6, paths, unasked=False),
    "prompts": Part("do verified prompts pay, and those next to drafts?", 5, prompts, unasked=False),
    "streams": Part("is the work of streams in order?", 3, streams, unasked=False),
    "bits": Part("are a request's bits the same, and at what speed?", 12, bits, unasked=False),
    "sweep": Part("is the bundled pair faster at every load?", 5, sweep),
    "kernels": Part("are the kernels right?", 4, kernels),
    "mathematics": Part("and on mathematics?", 4, equal_draws("math", 100, "64,128", 1), unasked=False),
    "training": Part("does a drafter accept more that is trained anew?", 10, training, unasked=False),
    "tests": Part("does everything else run that was written for a GPU?", 30, tests, unasked=False),
}


QUARTERS = (("paths", "prompts", "engines"), ("chat", "long", "streams"), ("mathematics", "training"), ("bits",))
"""Parts for a GPU that is lent for 15 minutes, one time after another; see the target ``gpu15`` of make."""


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
    ours = [str(ROOT / part) for part in ("", "kernels", "training")]
    path = os.pathsep.join([*ours, *filter(None, [os.environ.get("PYTHONPATH")])])
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


def _script(name: str, folder: str = "benchmarks/") -> list[str]:
    return [sys.executable, f"{folder}{name}"]


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
@click.option("--rehearse", "rehearses", is_flag=True, help="On a CPU, with tiny models: quarters without streams.")
def main(target: str, draft: str, prompts: tuple[str, ...], output: Path, names: list[str], rehearses: bool) -> None:
    """Run the command line; see the module."""
    console = Console(highlight=False, soft_wrap=True)
    # Python ends on SIGTERM without unwinding, which would leave the servers of a part behind.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    output = output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    path = output / "order.json"
    parts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    made = {**provenance.record(), "changes": provenance.changes_digest()}
    for name in names:
        part, folder = PARTS[name], output / name
        commands = part.commands(Setting(target, draft, prompts, folder, rehearses))
        terms = {"commit": made["commit"], "changes": made["changes"], "commands": _portable(commands)}
        before = parts.get(name, {})
        if terms.items() <= before.items() and before["status"] == "ok":
            console.print(f"{name}: done before")
            continue
        folder.mkdir(exist_ok=True)
        minutes = REHEARSED * part.minutes if rehearses else part.minutes
        console.print(f"{name}: {part.question} At most {minutes:g} minutes.")
        # Before it runs: what is ended from outside goes on all the same.
        parts[name] = {**made, **terms, "status": "running", "seconds": None}
        provenance.write_json(path, parts)
        parts[name] |= run_part(commands, minutes, output / f"{name}.log")
        provenance.write_json(path, parts)
        console.print(f"{name}: {parts[name]['status']}, {parts[name]['seconds']:.0f} s; {output / name}.log")
    (output / "open_paths.md").write_text(open_paths(output), encoding="utf-8")
    console.print(open_paths(output), markup=False)
    sys.exit(0 if all(parts[name]["status"] == "ok" for name in names) else 1)


def _portable(commands: Commands) -> Commands:
    return [[provenance.portable(word) for word in command] for command in commands]


if __name__ == "__main__":
    main()
