r"""Look for requests that end a server: bodies of all keys, grammars and scripts, right and wrong, many at once.

    python benchmarks/fuzz_requests.py --bodies 10000 --output RESULTS/fuzz.json

Servers of several kinds with DSPARK (the golden pair, a tokenizer of bytes) get their share of the bodies,
the same ones from the same seed. Streams are read, dropped after a few parts, or left at once. When a server ends or
lets a request hang, the bodies that it had are written down with the line of its log, and another one takes over. Then
a server without DSPARK is asked what ours answered with an HTTP 5xx, and a share of what it served: status, and what is
said where that is determined. (Some of what ours refuses would end that server.) A request that streams all the time
tells what holds others up: the longest times between two of its tokens, and the bodies that were under way.
All traffic is to 127.0.0.1.
"""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

import click
from fuzz.bodies import UNKNOWN, Body, Draw
from fuzz.traffic import (
    BROKEN,
    ENDED,
    HUNG,
    Answer,
    Probe,
    Traffic,
    is_determined,
    open_session,
    send,
    without_speculation,
)
from rich.console import Console

from sglang_dspark.tools import provenance
from sglang_dspark.tools.launch import CPU_ENV, CPU_FLAGS, PLUGIN, LaunchedServer, dspark_flags

TESTS = provenance.REPOSITORY / "tests"
sys.path.append(str(TESTS / "support"))

from letter_tokenizers import save_byte_tokenizer  # noqa: E402

GOLDEN = TESTS / "data" / "golden"
DRAFTER = dspark_flags(GOLDEN / "vanilla_g7")
WITH_DRAFTER = (*DRAFTER, "--speculative-dspark-answer-cache", "1")
STAND_INS = {"PYTHONPATH": f"{TESTS / 'server' / 'random_lengths'}:{TESTS / 'server' / 'patches'}"}
USERS = 12
EXAMPLES = 8  # of each finding
SHOWN = 600  # letters of a body
START_S = 1200.0
# Threads that wait for each other lose most of a machine that others use as well.
_ALONE = {"TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": "1"}
_FAILURE = re.compile(r".*(?:DSPARK: step|Error\b|Exception\b).*")


@dataclass(frozen=True)
class Kind:
    """Servers of one kind.

    Attributes:
        ours: flags only of the server with DSPARK.
        both: flags that the server without it has as well.
        env: variables of ours.
        unknown: tokens of the tokenizer that the target has not.
        doors: whether bodies ask for what ``both`` opens: turns of sessions, budgets of thinking, hidden states.
    """

    ours: Sequence[str] = WITH_DRAFTER
    both: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    unknown: tuple[str, ...] = UNKNOWN
    doors: bool = False


DOORS = (
    *("--reasoning-parser", "qwen3", "--enable-strict-thinking"),
    *("--enable-streaming-session", "--enable-return-hidden-states"),
)
KINDS = {
    "xgrammar": Kind(),
    "llguidance": Kind(both=("--grammar-backend", "llguidance"), unknown=()),
    "long blocks": Kind((*WITH_DRAFTER, "--speculative-dspark-block-size", "15")),
    "static": Kind((*WITH_DRAFTER, "--speculative-dspark-schedule", "static")),
    "observed": Kind((*WITH_DRAFTER, "--enable-metrics")),
    "parsers": Kind(both=("--tool-call-parser", "qwen25", "--reasoning-parser", "deepseek-r1")),
    "doors": Kind(both=DOORS, doors=True),
    "no drafter": Kind((*PLUGIN, "--speculative-dspark-draft-free")),
    "SGLang's worker": Kind(
        DRAFTER,
        env={
            **STAND_INS,
            "SGLANGS_OWN_ON_A_CPU": "1",
            "SGLANG_DSPARK_ENGINE": "scheduled",
            "SGLANG_RAGGED_VERIFY_MODE": "compact",
        },
    ),
}


class Findings:
    """The findings about one kind of server."""

    def __init__(self) -> None:
        self.ends: list[dict[str, Any]] = []
        self.answers: dict[int, Answer] = {}
        self.probe = Probe()
        self.logged: Counter[str] = Counter()
        self.failed_advice: Counter[str] = Counter()
        self.differences: list[dict[str, Any]] = []
        self.errors: list[dict[str, Any]] = []
        self.compared = 0

    def report(self) -> dict[str, Any]:
        """Return them for JSON."""
        usual = sorted(self.probe.usual) or [0.0]
        return {
            "bodies": len(self.answers),
            "statuses": dict(sorted(Counter(str(answer.status) for answer in self.answers.values()).items())),
            "ends": self.ends,
            "server_errors_of_ours_alone": self.errors,
            "compared": self.compared,
            "differences": self.differences,
            "texts_of_the_probe": list(self.probe.texts.values()),
            "steps_ms": {name: _ms(usual[int(q * (len(usual) - 1))]) for name, q in (("median", 0.5), ("longest", 1))},
            "held_up": [{"ms": _ms(gap), "bodies": numbers} for gap, numbers in sorted(self.probe.gaps, reverse=True)],
            "failed_advice": dict(self.failed_advice),
            "logged": dict(self.logged.most_common(20)),
        }


class Hunt:
    """Sends the bodies of one kind of server.

    Args:
        kind: the servers.
        bodies: by number.
        share: of the bodies, also sent to a server without DSPARK.
        folder: for logs, with the tokenizer.
        seconds: after which no more bodies are sent.
    """

    def __init__(self, kind: Kind, bodies: Mapping[int, Body], share: float, folder: Path, seconds: float) -> None:
        self._kind, self._bodies, self._share, self._folder, self._seconds = kind, bodies, share, folder, seconds
        self._left = iter(bodies.items())
        self._num_servers = 0
        self.found = Findings()

    def run(self, most_ends: int) -> Findings:
        """Send all bodies, unless too many servers end before or the time is over."""
        while self._send_on() and len(self.found.ends) < most_ends and self._seconds > 0:
            pass
        self._ask_plain()
        return self.found

    def _send_on(self) -> bool:
        """Return whether something is left to send after the end of a server."""
        with self._server(self._kind.ours, self._kind.env) as server:
            start = time.monotonic()
            traffic = Traffic(server.url, self._until(start + self._seconds), USERS, sessions=self._kind.doors)
            stands = asyncio.run(traffic.run())
            self._seconds -= time.monotonic() - start
            found = self.found
            found.answers |= traffic.answers
            found.probe.texts += traffic.probe.texts
            found.probe.usual += traffic.probe.usual
            found.probe.gaps += traffic.probe.gaps
            if stands:
                found.failed_advice.update(server.get_json("/dspark/stats").get("failed_advice", {}))
            log = server.log_path.read_text(errors="replace")
        found.logged.update(_without_numbers(line) for line in _FAILURE.findall(log))
        if not stands:
            steps = [line for line in log.splitlines() if "DSPARK: step" in line]
            hung = [_shown(number, self._bodies[number]) for number, a in traffic.answers.items() if a.status == HUNG]
            last = [_shown(number, body) for number, body in traffic.last.items()]
            failed = [line for line in log.splitlines() if _FAILURE.match(line)][-1:]
            found.ends.append({"after": len(found.answers), "log": steps[-1:] or failed, "hung": hung, "last": last})
        return not stands

    def _until(self, until: float) -> Iterator[tuple[int, Body]]:
        while time.monotonic() < until:
            item = next(self._left, None)
            if item is None:
                return
            yield item

    def _ask_plain(self) -> None:
        """Ask the server without DSPARK what ours failed at, and a share of what it served."""
        answers = self.found.answers
        failed = [number for number, answer in answers.items() if _is_error(answer)]
        served = [number for number, answer in answers.items() if answer.status == HTTPStatus.OK]
        alone = [number for number in served if "session_params" not in self._bodies[number].fields]
        asked = failed + alone[: round(self._share * len(alone))]
        questions = iter([(number, without_speculation(self._bodies[number])) for number in asked])
        while True:
            # Thoughts have masks, which SGLang applies only on GPUs.
            env = STAND_INS if self._kind.doors else {}
            with self._server((), env, "--disable-overlap-schedule") as server:
                left = asyncio.run(self._compare(server.url, questions))
                if left is None:
                    return

    async def _compare(self, url: str, questions: Iterator[tuple[int, Body]]) -> int | None:
        """Return the number of the body that ended the server; None if none did."""
        async with open_session() as session:
            for number, body in questions:
                answer = await send(session, url, body)
                self._judge(number, answer)
                if answer.status in (ENDED, HUNG):
                    return number
        return None

    def _judge(self, number: int, plain: Answer) -> None:
        ours, found = self.found.answers[number], self.found
        found.compared += 1
        case = {"ours": ours.status, "plain": plain.status, "body": _shown(number, self._bodies[number])}
        if _is_error(ours):
            if not _is_error(plain) and plain.status != ENDED:
                found.errors.append(case)
        elif ours.status != plain.status:
            found.differences.append(case)
        elif ours.content and plain.content and is_determined(self._bodies[number]) and ours.said() != plain.said():
            found.differences.append(case | {"said": [_cut(ours.said()), _cut(plain.said())]})

    def _server(self, flags: Sequence[str], env: Mapping[str, str], *more: str) -> LaunchedServer:
        self._num_servers += 1
        log = self._folder / f"server-{self._num_servers}.log"
        usual = (*CPU_FLAGS, "--dtype", "float32", "--tokenizer-path", str(self._folder))
        table = {"SGLANG_DSPARK_SPS_TABLE_PATH": str(self._folder / "step_times.json")}
        variables = {**CPU_ENV, **_ALONE, **table, **env}
        flags = (*usual, *self._kind.both, *more, *flags)
        return LaunchedServer(GOLDEN / "target", *flags, env=variables, log_path=log, startup_timeout_s=START_S)


def _is_error(answer: Answer) -> bool:
    return answer.status == BROKEN or (isinstance(answer.status, int) and answer.status >= 500)


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 1)


def _without_numbers(line: str) -> str:
    return re.sub(r"\d+", "#", re.sub(r"^\[[^]]*\] ", "", line))[:200]


def _cut(value: Any) -> str:
    return str(value)[:SHOWN]


def _shown(number: int, body: Body) -> dict[str, Any]:
    return {"number": number, "mode": body.mode, "path": body.path, "fields": ascii(body.text)[1 : SHOWN + 1]}


@click.command(help=__doc__)
@click.option("--bodies", default=10_000, show_default=True, help="Of all kinds of servers together.")
@click.option("--seed", default=0, show_default=True)
@click.option("--kind", "kinds", type=click.Choice(list(KINDS)), multiple=True, help="Default: all.")
@click.option("--skip", default="(?!)", help="Bodies are not sent in whose JSON this regular expression is found.")
@click.option("--share", default=0.1, show_default=True, help="Of the bodies, compared with a server without DSPARK.")
@click.option("--most-ends", default=5, show_default=True, help="Of servers of a kind, after which its rest is left.")
@click.option("--minutes", default=20.0, show_default=True, help="Of traffic to servers of a kind, at most.")
@click.option("--output", type=click.Path(path_type=Path), required=True)
def main(bodies: int, seed: int, kinds: tuple[str, ...], skip: str, output: Path, **limits: Any) -> None:
    """Run the command line; see the module."""
    console, chosen = Console(), kinds or tuple(KINDS)
    drawn = {number: Draw(seed, number).body() for number in range(bodies)}
    sent = {number: body for number, body in drawn.items() if not re.search(skip, body.text)}
    reports: dict[str, Any] = {}
    for i, name in enumerate(chosen):
        mine = {number: body for number, body in sent.items() if number % len(chosen) == i}
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
            kind, path, seconds = KINDS[name], Path(folder), 60 * limits["minutes"]
            if kind.doors:
                mine = {number: Draw(seed, -number - 1).through_doors(body) for number, body in mine.items()}
            hunt = Hunt(kind, mine, limits["share"], save_byte_tokenizer(path, beyond=kind.unknown), seconds)
            reports[name] = hunt.run(limits["most_ends"]).report()
        console.print(name, _total({name: reports[name]}))
        report = _total(reports) | {"seed": seed, "skip": skip, "kinds": reports}
        output.parent.mkdir(parents=True, exist_ok=True)
        provenance.write_json(output, provenance.record() | report)
    sys.exit(0 if report["ends"] == report["server_errors_of_ours_alone"] == 0 else 1)


def _total(reports: Mapping[str, Any]) -> dict[str, Any]:
    each = reports.values()
    return {
        "bodies": sum(one["bodies"] for one in each),
        "ends": sum(len(one["ends"]) for one in each),
        "server_errors_of_ours_alone": sum(len(one["server_errors_of_ours_alone"]) for one in each),
        "differences": sum(len(one["differences"]) for one in each),
        "probes_with_another_text": sum(sum(t := one["texts_of_the_probe"]) - max(t, default=0) for one in each),
        "failed_advice": sum(sum(one["failed_advice"].values()) for one in each),
        "most_held_up_ms": max((held["ms"] for one in each for held in one["held_up"]), default=0),
    }


if __name__ == "__main__":
    main()
