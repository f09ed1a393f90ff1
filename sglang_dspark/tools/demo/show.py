"""Serve a pair of models with DSPARK, then the target alone, and print what came out of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from textwrap import shorten

import openai
import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sglang_dspark.errors import DSparkError
from sglang_dspark.tools.demo.compare import (
    PROMPTS,
    Answer,
    Questioner,
    accept_length,
    first_difference,
    has_chat_template,
    tokens_per_second,
)
from sglang_dspark.tools.launch import CPU_ENV, CPU_FLAGS, LaunchedServer, dspark_flags

GPU_FLAGS = ("--mem-fraction-static", "0.5")


class Demo:
    """One comparison. The servers run one after the other: side by side they would take each other's cores."""

    def __init__(
        self,
        console: Console,
        target: Path,
        draft: Path,
        *,
        prompts: Sequence[str],
        max_tokens: int,
        dtype: str,
        log_dir: Path,
    ) -> None:
        self._console = console
        self._target = target
        self._draft = draft
        self._prompts = prompts or PROMPTS
        self._max_tokens = max_tokens
        self._log_dir = log_dir
        on_gpu = torch.cuda.is_available()
        self._device = torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads"
        self._flags = (*(GPU_FLAGS if on_gpu else CPU_FLAGS), "--dtype", dtype)
        self._env: Mapping[str, str] = {} if on_gpu else CPU_ENV

    def run(self) -> None:
        """Serve twice and print everything.

        Raises:
            LaunchError: a server did not start.
            DSparkError: a server refused a prompt or died.
        """
        self._console.print(f"target   {self._target}\ndrafter  {self._draft}", soft_wrap=True)
        with_dspark = self._serve("dspark", dspark_flags(self._draft))
        plain = self._serve("plain", ())
        self._print_table(with_dspark, plain)
        self._print_differences(with_dspark, plain)

    def _serve(self, name: str, flags: Sequence[str]) -> list[Answer]:
        log_path = self._log_dir / f"demo-{name}.log"
        self._console.print(f"\n[bold]{name} server[/] on {self._device}; log: {log_path}", soft_wrap=True)
        with ExitStack() as stack:
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
                questioner = Questioner(server, chat=has_chat_template(self._target), speculative=bool(flags))
                status.update("sending a warm-up request")
                questioner.warm_up()
            self._console.print(f"[dim]ready after {server.startup_s:.0f} s[/]")
            return [self._ask(questioner, prompt) for prompt in self._prompts]

    def _ask(self, questioner: Questioner, prompt: str) -> Answer:
        self._console.print(f"\n[cyan]> {escape(prompt)}[/]")
        try:
            answer = questioner.ask(prompt, self._max_tokens, lambda text: self._console.out(text, end=""))
        except openai.OpenAIError as error:
            raise DSparkError(f"the server did not answer: {error}") from error
        rate = f"{answer.num_tokens} tokens in {answer.seconds:.1f} s, {tokens_per_second([answer]):.1f} tok/s"
        length = accept_length([answer])
        if length is not None:
            rate += f", accept length {length:.2f}"
        self._console.print(f"\n[dim]({rate})[/]")
        return answer

    def _print_table(self, with_dspark: Sequence[Answer], plain: Sequence[Answer]) -> None:
        table = Table(box=SIMPLE)
        table.add_column("prompt")
        for heading in ("tokens", "accept length", "DSPARK", "plain", "ratio", "same text"):
            table.add_column(heading, justify="right", no_wrap=True)
        for prompt, ours, theirs in zip(self._prompts, with_dspark, plain, strict=True):
            table.add_row(escape(shorten(prompt, 15, placeholder="...")), *_cells([ours], [theirs]))
        table.add_section()
        table.add_row("all", *_cells(with_dspark, plain))
        self._console.print(table)
        self._console.print(
            "Speeds in tokens per second, from sending a request to the end of its stream. Greedy, one request at a "
            "time, each prompt asked once; the servers ran one after the other with the same settings."
        )

    def _print_differences(self, with_dspark: Sequence[Answer], plain: Sequence[Answer]) -> None:
        for prompt, ours, theirs in zip(self._prompts, with_dspark, plain, strict=True):
            index = first_difference(ours.text, theirs.text)
            if index is not None:
                self._console.print(f"\n[yellow]texts differ from character {index}[/] for: {escape(prompt)}")
                self._console.out(f"DSPARK: ...{ours.text[max(0, index - 40) : index + 40]!r}")
                self._console.out(f"plain:  ...{theirs.text[max(0, index - 40) : index + 40]!r}")


def _cells(with_dspark: Sequence[Answer], plain: Sequence[Answer]) -> list[str]:
    rate, plain_rate = tokens_per_second(with_dspark), tokens_per_second(plain)
    length = accept_length(with_dspark)
    same = all(ours.text == theirs.text for ours, theirs in zip(with_dspark, plain, strict=True))
    return [
        str(sum(answer.num_tokens for answer in with_dspark)),
        "-" if length is None else f"{length:.2f}",
        f"{rate:.1f}",
        f"{plain_rate:.1f}",
        f"{rate / plain_rate:.2f}",
        "[green]yes[/]" if same else "[yellow]no[/]",
    ]
