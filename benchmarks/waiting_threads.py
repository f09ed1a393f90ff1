"""Compare how the threads of an operation wait for each other on a CPU: speed of servers alone, and next to a program.

    python benchmarks/waiting_threads.py --target T --draft D --output waiting.json

Servers of one kind differ only in the variables of OpenMP. They are asked in turns for the same text, one request at a
time. Run it on an idle machine.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import geometric_mean, median
from time import perf_counter
from typing import Any

import click
import requests

from sglang_dspark.tools import provenance
from sglang_dspark.tools.launch import CPU_ENV, CPU_FLAGS, LaunchedServer, dspark_flags

PROMPT = "Write a story about a king and his three daughters."
WAYS = {
    "ACTIVE": {"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "300000"},
    "PASSIVE": {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"},
    **{
        f"{spins} spins": {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": str(spins)}
        for spins in (1000, 3000, 10000, 30000)
    },
}
"""The first spins as long as OpenMP does by default; all others are compared with it."""


@contextmanager
def busy_program(num: int) -> Iterator[None]:
    """Run so many programs that never wait."""
    programs = [subprocess.Popen([sys.executable, "-c", "while 1: pass"]) for _ in range(num)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()


def seconds_of(server: LaunchedServer, tokens: int) -> float:
    """Return how long a server takes for one answer."""
    options = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    begin = perf_counter()
    requests.post(f"{server.url}/generate", json={"text": PROMPT, "sampling_params": options}).raise_for_status()
    return perf_counter() - begin


@click.command(help=__doc__)
@click.option("--target", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--draft", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--dtype", default="float32", show_default=True)
@click.option(
    "--kind", "kinds", multiple=True, default=("plain", "static"), show_default=True, help="plain or a policy"
)
@click.option("--way", "names", multiple=True, default=tuple(WAYS), show_default=True, type=click.Choice(list(WAYS)))
@click.option("--tokens", default=64, show_default=True)
@click.option("--rounds", default=8, show_default=True, help="alone; a third of them next to a busy program")
@click.option("--output", type=click.Path(path_type=Path), required=True)
def main(
    target: Path,
    draft: Path,
    dtype: str,
    kinds: Sequence[str],
    names: Sequence[str],
    tokens: int,
    rounds: int,
    output: Path,
) -> None:
    """Write, for each kind of server and load, seconds per request and speeds relative to the first way's."""
    found: dict[str, Any] = {}
    for kind in kinds:
        policy = [] if kind == "plain" else [*dspark_flags(draft), "--speculative-dspark-schedule", kind]
        with ExitStack() as stack:
            servers = {
                name: stack.enter_context(
                    LaunchedServer(target, *CPU_FLAGS, "--dtype", dtype, *policy, env={**CPU_ENV, **WAYS[name]})
                )
                for name in names
            }
            for server in servers.values():
                seconds_of(server, tokens)
            for programs in (0, 1):
                taken: dict[str, list[float]] = {name: [] for name in servers}
                with busy_program(programs):
                    for _ in range(max(2, rounds // 3) if programs else rounds):
                        for name, server in servers.items():
                            taken[name].append(seconds_of(server, tokens))
                first = taken[names[0]]
                load = found.setdefault(kind, {})["next to a busy program" if programs else "alone"] = {
                    name: {
                        "seconds": [round(second, 3) for second in (median(mine), min(mine), max(mine))],
                        "speed": round(geometric_mean([a / b for a, b in zip(first, mine, strict=True)]), 3),
                        "requests": len(mine),
                    }
                    for name, mine in taken.items()
                }
                click.echo(f"{kind}, {programs} busy programs: {load}")
    provenance.write_json(output, {**provenance.record(), "dtype": dtype, "tokens": tokens, "servers": found})


if __name__ == "__main__":
    main()
