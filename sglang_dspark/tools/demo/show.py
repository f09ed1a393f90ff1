"""Serve a target with and without the plugin, side by side, and print how they compare."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from textwrap import shorten

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from sglang_dspark.errors import DSparkError
from sglang_dspark.tools.demo.contest import (
    AUTO,
    MODES,
    OFF,
    PLAIN,
    Answers,
    Contest,
    accept_length,
    answers_of,
    has_chat_template,
    ratios,
    schedule,
)
from sglang_dspark.tools.launch import CPU_ENV, CPU_FLAGS, LaunchedServer, dspark_flags

PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "Natalia sold 48 clips in April and half as many in May. How many clips did she sell in total? Think step by step.",
    "Explain in simple words why the sky is blue.",
)
# The table of step times then has the load that the demo meets, and is measured in seconds.
ONE_AT_A_TIME = ("--max-running-requests", "1")
GPU_FLAGS = ("--mem-fraction-static", "0.4")


class Demo:
    """One comparison of plain SGLang, the plugin without speculation, and the plugin with it.

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
        self._on_gpu = torch.cuda.is_available()
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
            contest = Contest(plain, dspark, self._max_tokens, chat=has_chat_template(self._target))
            try:
                answers = self._measure(contest)
            except OSError as error:
                raise DSparkError(f"the server did not answer: {error}; its log is in {self._log_dir}") from error
        for index, prompt in enumerate(self._prompts):
            self._console.print(f"\n[cyan]> {escape(prompt)}[/]")
            self._console.out(answers_of(answers, PLAIN, index)[0].text.strip())
        self._print_speeds(answers)
        self._print_prompts(answers)

    def _serve(self, stack: ExitStack, name: str, flags: Sequence[str]) -> LaunchedServer:
        log_path = self._log_dir / f"demo-{name}.log"
        with self._console.status(f"starting the {name} server") as status:
            server = LaunchedServer(
                self._target,
                *self._flags,
                *flags,
                env={} if self._on_gpu else CPU_ENV,
                log_path=log_path,
                progress=lambda seconds, _: status.update(f"starting the {name} server: {seconds:.0f} s"),
            )
            stack.enter_context(server)
            server.suspend()
        self._console.print(
            f"[dim]{name} server ready after {server.startup_s:.0f} s; log: {log_path}[/]", soft_wrap=True
        )
        return server

    def _measure(self, contest: Contest) -> Answers:
        for mode in MODES:  # first answers, which are slower
            contest.ask(self._prompts[0], mode)
        turns = list(schedule(len(self._prompts), self._rounds))
        asked = track(turns, "asking the servers in turns", console=self._console, transient=True)
        return {turn: contest.ask(self._prompts[turn.prompt], turn.mode) for turn in asked}

    def _print_speeds(self, answers: Answers) -> None:
        table = Table(box=SIMPLE)
        for heading in ("", "tokens per second", "", "times as fast"):
            table.add_column(heading, no_wrap=True)
        compared = {OFF: ("off / plain", PLAIN), AUTO: ("auto / off", OFF)}
        for mode in MODES:
            speed = _with_range([answer.tokens_per_second for answer in answers_of(answers, mode)], 1)
            name, base = compared.get(mode, ("", mode))
            table.add_row(mode.name, speed, name, _with_range(ratios(answers, mode, base), 2) if name else "")
        self._console.print(table)
        own = "own steps" if self._on_gpu else "own CPU attention"
        length = accept_length(answers_of(answers, AUTO))
        self._console.print(
            f"off / plain is the plugin's {own}, without a drafter; auto / off is speculation: {length:.2f} tokens per "
            f"step.\nMedians of {len(answers) // len(MODES)} answers each (prompts: {len(self._prompts)}, rounds: "
            f"{self._rounds}), in brackets their range. One greedy request at a time. A ratio pairs answers to the "
            "same prompt in the same round. Servers take turns in shuffled order; other busy programs spread ratios."
        )

    def _print_prompts(self, answers: Answers) -> None:
        table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
        for heading in ("prompt", "plain", "off", "auto", "auto / off", "per step", "same text"):
            table.add_column(heading, no_wrap=True)
        for index, prompt in enumerate(self._prompts):
            given = [answers_of(answers, mode, index) for mode in MODES]
            same = len({answer.text for one in given for answer in one}) == 1
            table.add_row(
                escape(shorten(prompt, 22, placeholder="...")),
                *(f"{median(answer.tokens_per_second for answer in one):.1f}" for one in given),
                f"{median(ratios(answers, AUTO, OFF, index)):.2f}",
                f"{accept_length(given[-1]):.2f}",
                "[green]yes[/]" if same else "[yellow]no[/]",
            )
            if not same:
                self._print_difference([answer.text for one in given for answer in one])
        self._console.print(table)

    def _print_difference(self, texts: Sequence[str]) -> None:
        first, other = texts[0], next(text for text in texts if text != texts[0])
        at = next((i for i, (a, b) in enumerate(zip(first, other, strict=False)) if a != b), min(map(len, texts)))
        shown = slice(max(0, at - 40), at + 40)
        self._console.print(f"[yellow]texts differ from character {at}:[/]")
        self._console.out(f"...{first[shown]!r}\n...{other[shown]!r}")


def _with_range(values: Sequence[float], digits: int) -> str:
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"
