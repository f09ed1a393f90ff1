r"""Test whether a server stays whole under mixed traffic of 16 users, with everything that a request can ask for.

    python benchmarks/soak.py --target T --draft D --prompts FILE --minutes 30 --output RESULTS/soak.json

The target alone answers the probes first. Then a DSPARK server gets requests of random kinds for so many minutes, and
until every probe has been asked: greedy probes in turn, whose texts are compared, sampled and seeded ones, penalties,
grammars, presets, caps, tiny and huge prompts, and streams that the client drops, while its policy keeps changing. At
the end the K/V pool has to be as empty as at the start, no answer may have been an HTTP 5xx, no probe another text, and
the memory of the processes must not have grown with time. A change of the policy that finds the scheduler busy with
long prompts for too long (HTTP 503) is counted apart. Then the scheduler is killed, and the server has to end.

float32, so that a text does not depend on the batch; near-ties are not told from errors here, ``identity.py`` does.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import click
import psutil
from identity import encode, generate
from rich.console import Console

from sglang_dspark.tools import provenance
from sglang_dspark.tools.launch import CPU_ENV, CPU_FLAGS, LaunchedServer, dspark_flags

USERS = 16
POLICY_S = 15.0
SAMPLE_S = 10.0
WARM_UP_SHARE = 0.25  # of the time: memory still grows into caches
MOST_GROWTH = 0.05  # of the memory after that, by the end
END_S = 60.0
TINY, HUGE = 1, 3000  # tokens of a prompt
BUSY = "policy 503"

POLICIES: tuple[dict[str, Any], ...] = (
    {"policy": "auto"},
    {"policy": "static"},
    {"policy": "static", "verify_len": 2},
    {"policy": "early-stop"},
    {"policy": "threshold", "confidence_threshold": 0.5},
    {"policy": "off"},
)
PARAMETERS: dict[str, dict[str, Any]] = {
    "sampled": {"temperature": 0.9, "top_p": 0.95, "top_k": 40},
    "seeded": {"temperature": 1.0, "sampling_seed": 11},
    "penalties": {"temperature": 0, "frequency_penalty": 0.4, "repetition_penalty": 1.2, "min_new_tokens": 8},
    "grammar": {"temperature": 0.7, "regex": r"[A-Za-z ,]{20,60}\."},
    "biased": {"temperature": 0, "logit_bias": {"5": 5.0}},
}
SPECULATION: tuple[dict[str, Any], ...] = (
    {"preset": "summarization", "min_ngram": 1},
    {"max_verify": 1},
    {"enabled": False},
    {"confidence_threshold": 0.6},
    {"trace": True},
)
KINDS = ("probe", "probe", *PARAMETERS, "tiny", "huge", "dropped")


@dataclass
class Tally:
    """Counts of answers, wrong probes and memory samples.

    Attributes:
        answers: by kind and HTTP status, dropped streams by ``dropped``.
        wrong: probes whose text is not that of the target alone.
        samples: seconds since the start, and the memory of the server's processes in MiB.
    """

    answers: Counter[str] = field(default_factory=Counter)
    wrong: list[int] = field(default_factory=list)
    samples: list[tuple[float, float]] = field(default_factory=list)


class Traffic:
    """Users of one server."""

    def __init__(self, server: LaunchedServer, probes: Sequence[list[int]], expected: Sequence[list[int]]) -> None:
        self._server, self._probes, self._expected = server, probes, expected
        self._words = sorted({token for probe in probes for token in probe})
        self._random = random.Random(0)
        self._num_asked = 0  # probes
        self.tally = Tally()

    async def run(self, seconds: float) -> None:
        """Send requests for so long and until every probe was asked, and wait for the last answers."""
        self._start = time.monotonic()
        self._end = self._start + seconds
        timeout = aiohttp.ClientTimeout(total=600)
        async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.TaskGroup() as group:
            for _ in range(USERS):
                group.create_task(self._user(session))
            group.create_task(self._switch(session))
            group.create_task(self._watch())

    def _goes_on(self) -> bool:
        return time.monotonic() < self._end or self._num_asked < len(self._probes)

    async def _user(self, session: aiohttp.ClientSession) -> None:
        while self._goes_on():
            kind = self._random.choice(KINDS)
            index = self._random.randrange(len(self._probes))
            if kind == "probe":
                index = self._num_asked % len(self._probes)
                self._num_asked += 1
            body = self._body(kind, index)
            async with session.post(self._server.url + "/generate", json=body) as response:
                if kind == "dropped":
                    await response.content.readline()
                    self.tally.answers["dropped"] += 1
                    continue  # leaving the block closes the connection
                answer = await response.json()
                self.tally.answers[f"{kind} {response.status}"] += 1
                if kind == "probe" and answer.get("output_ids") != self._expected[index]:
                    self.tally.wrong.append(index)

    def _body(self, kind: str, index: int) -> dict[str, Any]:
        prompt, parameters = self._probes[index], {"max_new_tokens": self._random.choice((8, 40, 96))}
        if kind == "probe":
            parameters = {"temperature": 0, "max_new_tokens": len(self._expected[index])}
        elif kind in ("tiny", "huge"):
            length = TINY if kind == "tiny" else HUGE
            prompt = self._random.choices(self._words, k=length)
        body: dict[str, Any] = {
            "input_ids": prompt,
            "sampling_params": parameters | PARAMETERS.get(kind, {}),
            "stream": kind == "dropped",
        }
        if self._random.random() < 0.5:
            body["speculation"] = self._random.choice(SPECULATION)
        return body

    async def _switch(self, session: aiohttp.ClientSession) -> None:
        while self._goes_on():
            policy = self._random.choice(POLICIES)
            async with session.post(self._server.url + "/dspark/policy", json=policy) as response:
                self.tally.answers[f"policy {response.status}"] += 1
            await asyncio.sleep(POLICY_S)

    async def _watch(self) -> None:
        while self._goes_on():
            self.tally.samples.append((time.monotonic() - self._start, _memory_mib(self._server.pid)))
            await asyncio.sleep(SAMPLE_S)


def _processes(pid: int) -> list[psutil.Process]:
    parent = psutil.Process(pid)
    return [parent, *parent.children(recursive=True)]


def _memory_mib(pid: int) -> float:
    return sum(process.memory_info().rss for process in _processes(pid)) / 2**20


def _tokens_in_pool(server: LaunchedServer) -> int:
    server.flush_cache()
    return int(server.get_json("/v1/loads")["loads"][0]["num_used_tokens"])


def _growth(samples: Sequence[tuple[float, float]]) -> float:
    """Return the relative growth of the memory from the warm-up to the end: medians of the fifths at both ends."""
    settled = [memory for _, memory in samples[int(len(samples) * WARM_UP_SHARE) :]]
    part = max(1, len(settled) // 5)
    first, last = sorted(settled[:part]), sorted(settled[-part:])
    return last[len(last) // 2] / first[len(first) // 2] - 1


def _ends_without_its_scheduler(server: LaunchedServer) -> bool:
    scheduler = next(p for p in _processes(server.pid) if "scheduler" in " ".join([p.name(), *p.cmdline()]))
    scheduler.send_signal(signal.SIGKILL)
    launcher = psutil.Process(server.pid)
    end = time.monotonic() + END_S
    while time.monotonic() < end:
        if not launcher.is_running() or launcher.status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.5)
    return False


@click.command(help=__doc__)
@click.option("--target", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--draft", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--prompts", "files", type=click.Path(path_type=Path, exists=True), multiple=True, required=True)
@click.option("--probes", default=300, show_default=True, help="Greedy texts that are compared.")
@click.option("--max-tokens", default=48, show_default=True, help="Of a probe.")
@click.option("--minutes", default=30.0, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), required=True)
def main(
    target: Path, draft: Path, files: tuple[Path, ...], probes: int, max_tokens: int, minutes: float, output: Path
) -> None:
    """Command line; see the module."""
    console = Console()
    asked = encode(target, files, probes)
    flags = [*CPU_FLAGS, "--dtype", "float32"]
    with LaunchedServer(target, *flags, env=CPU_ENV) as server:
        expected = [answer["output_ids"] for answer in generate(server, asked, max_tokens, USERS)]
    with LaunchedServer(target, *flags, *dspark_flags(draft), env=CPU_ENV) as server:
        before = _tokens_in_pool(server)
        traffic = Traffic(server, asked, expected)
        asyncio.run(traffic.run(60 * minutes))
        after = _tokens_in_pool(server)
        ended = _ends_without_its_scheduler(server)
    tally = traffic.tally
    busy = tally.answers.pop(BUSY, 0)
    errors = {name: count for name, count in tally.answers.items() if name.split()[-1].startswith("5")}
    growth = _growth(tally.samples)
    report = {
        **provenance.record(),
        "minutes": minutes,
        "users": USERS,
        "answers": dict(sorted(tally.answers.items())),
        "server_errors": errors,
        "busy": busy,
        "probes": len(asked),
        "wrong_probes": tally.wrong,
        "tokens_in_pool": {"before": before, "after": after},
        "memory_growth": growth,
        "memory_mib": [[round(seconds), round(memory)] for seconds, memory in tally.samples],
        "ended_without_its_scheduler": ended,
        "passed": not errors and not tally.wrong and after == before and growth <= MOST_GROWTH and ended,
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    provenance.write_json(output, report)
    console.print({name: value for name, value in report.items() if name != "memory_mib"})
    sys.exit(0 if report["passed"] else 1)


if __name__ == "__main__":
    main()
