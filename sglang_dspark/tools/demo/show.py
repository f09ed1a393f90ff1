"""Serve a target with and without the plugin, side by side, and print how they compare."""

from __future__ import annotations

import time
import urllib.error
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from textwrap import shorten

import openai
import psutil
import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from sglang_dspark.errors import DSparkError
from sglang_dspark.tools.demo.figures import Spread, accept_length, answers, first_difference, ratio, speed
from sglang_dspark.tools.demo.questioner import has_chat_template
from sglang_dspark.tools.demo.turns import AUTO, MODES, OFF, PLAIN, Contest, Measured, Turn, schedule, share_of_others
from sglang_dspark.tools.launch import CPU_ENV, CPU_FLAGS, LaunchedServer, dspark_flags

PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "Natalia sold 48 clips in April and half as many in May. How many clips did she sell in total? Think step by step.",
    "Explain in simple words why the sky is blue.",
)
GPU_FLAGS = ("--mem-fraction-static", "0.4")
# The table of step times then has the loads that the demo meets, and is measured in seconds.
ONE_AT_A_TIME = ("--max-running-requests", "1")
LAST_START_S = 75.0
"""No further round starts so long after the first one."""
BUSY_SHARE = 0.05
"""Share of the machine's cores, taken by others, from which on the demo says that the machine is busy."""


class Demo:
    """One comparison of plain SGLang, the plugin without speculation, and the plugin with it."""

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
        self._console = console
        self._target = target
        self._draft = draft
        self._prompts = prompts or PROMPTS
        self._max_tokens = max_tokens
        self._rounds = rounds
        self._log_dir = log_dir
        self._on_gpu = torch.cuda.is_available()
        cores = f"CPU, {torch.get_num_threads()} threads"
        self._place = f"{torch.cuda.get_device_name() if self._on_gpu else cores}, {dtype}"
        self._flags = (*(GPU_FLAGS if self._on_gpu else CPU_FLAGS), *ONE_AT_A_TIME, "--dtype", dtype)
        self._env: Mapping[str, str] = {} if self._on_gpu else CPU_ENV

    def run(self) -> None:
        """Start both servers, let them take turns, and print everything.

        Raises:
            LaunchError: a server did not start.
            DSparkError: a server refused a prompt or died.
        """
        self._console.print(f"target   {self._target}\ndrafter  {self._draft}\non       {self._place}", soft_wrap=True)
        measured: list[Measured] = []
        with ExitStack() as stack:
            plain = self._serve(stack, "plain", ())
            dspark = self._serve(stack, "dspark", dspark_flags(self._draft))
            contest = Contest(plain, dspark, self._prompts, self._max_tokens, chat=has_chat_template(self._target))
            try:
                self._measure(contest, measured)
            except (openai.OpenAIError, urllib.error.URLError) as error:
                raise DSparkError(f"the server did not answer: {error}") from error
        self._print_summary(measured)
        self._print_prompts(measured)
        self._print_differences(measured)
        self._print_load(measured)

    def _serve(self, stack: ExitStack, name: str, flags: Sequence[str]) -> LaunchedServer:
        log_path = self._log_dir / f"demo-{name}.log"
        with self._console.status(f"starting the {name} server") as status:
            server = LaunchedServer(
                self._target,
                *self._flags,
                *flags,
                env=self._env,
                log_path=log_path,
                progress=lambda seconds, _: status.update(f"starting the {name} server: {seconds:.0f} s"),
            )
            stack.enter_context(server)
            server.suspend()
        self._console.print(
            f"[dim]{name} server ready after {server.startup_s:.0f} s; log: {log_path}[/]", soft_wrap=True
        )
        return server

    def _measure(self, contest: Contest, measured: list[Measured]) -> None:
        rounds, start_s = schedule(len(self._prompts), self._rounds), time.monotonic()
        columns = (TextColumn("{task.description:38}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self._console, transient=True) as progress:
            task = progress.add_task("first answers, not counted", total=sum(map(len, rounds)))
            for mode in MODES:
                contest.ask(Turn(0, 0, mode))
            for index, turns in enumerate(rounds):
                if index and time.monotonic() - start_s > LAST_START_S:
                    self._console.print(
                        f"\n[yellow]ended after {index} of {self._rounds} rounds:[/] they take long here"
                    )
                    break
                for turn in turns:
                    progress.update(task, description=f"round {index + 1} of {self._rounds}: {turn.mode.name}")
                    measured.append(contest.ask(turn))
                    progress.advance(task)
                    if index == 0 and len(measured) % len(MODES) == 0:
                        self._print_answer(measured, turn.prompt)

    def _print_answer(self, measured: Sequence[Measured], prompt: int) -> None:
        """The text that all modes gave in the first round; where they differ, plain SGLang's."""
        self._console.print(f"\n[cyan]> {escape(self._prompts[prompt])}[/]")
        self._console.out(answers(measured, PLAIN, prompt)[0].text.strip())

    def _print_summary(self, measured: Sequence[Measured]) -> None:
        table = Table(box=SIMPLE)
        for heading in ("", "tokens per second", "", "times as fast"):
            table.add_column(heading, no_wrap=True)
        table.add_row(PLAIN.name, _in_words(speed(measured, PLAIN), 1), "", "")
        for name, mode, base in (("off / plain", OFF, PLAIN), ("auto / off", AUTO, OFF)):
            factor = _in_words(ratio(measured, mode, base), 2)
            table.add_row(mode.name, _in_words(speed(measured, mode), 1), name, f"[bold]{factor}[/]")
        self._console.print(table)
        own = "own steps" if self._on_gpu else "own CPU attention"
        length = accept_length(answers(measured, AUTO))
        gained = "" if length is None else f": {length:.2f} tokens per step"
        self._console.print(f"off / plain is the plugin's {own}, without a drafter; auto / off is speculation{gained}.")
        self._console.print(
            f"Medians of {len(measured) // len(MODES)} answers each (prompts: {len(self._prompts)}, rounds: "
            f"{measured[-1].turn.round + 1}), in brackets the middle half of them. One greedy request at a time, from "
            "sending it to the end of its stream. A ratio pairs answers to the same prompt in the same round. All "
            "take turns in shuffled order, each after an answer that does not count."
        )

    def _print_prompts(self, measured: Sequence[Measured]) -> None:
        table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
        table.add_column("prompt", no_wrap=True)
        for heading in ("plain", "off", "auto", "auto / off", "per step", "same text"):
            table.add_column(heading, justify="right", no_wrap=True)
        for index, prompt in enumerate(self._prompts):
            speeds = [f"{speed(measured, mode, index).median:.1f}" for mode in MODES]
            length = accept_length(answers(measured, AUTO, index))
            same = len({answer.text for mode in MODES for answer in answers(measured, mode, index)}) == 1
            table.add_row(
                escape(shorten(prompt, 22, placeholder="...")),
                *speeds,
                f"{ratio(measured, AUTO, OFF, index).median:.2f}",
                "-" if length is None else f"{length:.2f}",
                "[green]yes[/]" if same else "[yellow]no[/]",
            )
        self._console.print(table)

    def _print_differences(self, measured: Sequence[Measured]) -> None:
        for index, prompt in enumerate(self._prompts):
            expected = answers(measured, PLAIN, index)[0].text
            for mode in MODES:
                texts = {answer.text for answer in answers(measured, mode, index)} - {expected}
                for text in sorted(texts):
                    at = first_difference(expected, text) or 0
                    self._console.print(f"\n[yellow]texts differ from character {at}[/] for: {escape(prompt)}")
                    self._console.out(f"{PLAIN.name}: ...{expected[max(0, at - 40) : at + 40]!r}")
                    self._console.out(f"{mode.name}: ...{text[max(0, at - 40) : at + 40]!r}")

    def _print_load(self, measured: Sequence[Measured]) -> None:
        share, cores = share_of_others(measured), psutil.cpu_count() or 1
        if share > BUSY_SHARE:
            self._console.print(
                f"\n[yellow]This machine was busy:[/] other programs took {share * cores:.1f} of its {cores} cores "
                "during the answers. Speeds are lower than on a quiet machine, and ratios less certain: run it again."
            )


def _in_words(spread: Spread, digits: int) -> str:
    return f"{spread.median:.{digits}f} ({spread.low:.{digits}f} to {spread.high:.{digits}f})"
