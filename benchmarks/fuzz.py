r"""Do odd requests harm a server or its other users? A real server, thousands of bodies, one neighbour.

    python benchmarks/fuzz.py --target T --draft D --number 10000 --output RESULTS/fuzz.json

The bodies know what a request looks like, and get something in it wrong: types, numbers, encodings, depth, headers, the
field `speculation`, policies; some clients go away. Meanwhile a neighbour streams the same greedy text again and again.
No answer may be an HTTP 5xx, none may stay away or break off, the server has to live, and the neighbour's text may not
change. Nor may a step of his come more than 50 ms later than the latest one beside as many users without odd requests.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
from fuzzing.bodies import Bodies
from fuzzing.traffic import LATE_MS, Neighbour, Tally, alone, send, slow_moments
from rich.console import Console

from sglang_dspark.tools import provenance
from sglang_dspark.tools.launch import CPU_ENV, CPU_FLAGS, LaunchedServer, dspark_flags

SLOW_MOMENTS = SHOWN_TEXTS = 5  # that are reported


def report_of(tally: Tally, quiet: Neighbour, beside_usual: Neighbour, neighbour: Neighbour) -> dict[str, Any]:
    """JSON: what happened."""
    expected = quiet.texts[0]
    readers = {"alone": quiet, "beside usual requests": beside_usual, "beside odd requests": neighbour}
    wrong = [(name, text) for name, reader in readers.items() for text in reader.texts if text != expected]
    bound = max(beside_usual.gaps_ms, default=0.0) + LATE_MS
    late = [gap for gap in neighbour.gaps_ms if gap > bound]
    return {
        "requests": sum(tally.answers.values()),
        "answers": dict(sorted(tally.answers.items())),
        "server_errors": tally.num_errors,
        "first_errors": tally.errors,
        "hangs": tally.hangs,
        "broken": tally.broken,
        "server_ended": tally.ended,
        "slowest_answer": {"seconds": tally.slowest_s[0], "kind": tally.slowest_s[1]},
        "neighbour": {
            "texts": len(neighbour.texts),
            "wrong_texts": len(wrong),
            "first_wrong_texts": wrong[:SHOWN_TEXTS],
            "alone_ms": _gaps(quiet),
            "beside_usual_requests_ms": _gaps(beside_usual),
            "beside_odd_requests_ms": _gaps(neighbour),
            "late_steps": len(late),
            "slowest_moments": slow_moments(neighbour, tally, SLOW_MOMENTS),
        },
        "passed": tally.passed and not wrong and not late,
    }


def _gaps(neighbour: Neighbour) -> dict[str, float]:
    gaps = sorted(neighbour.gaps_ms) or [0.0]
    percentiles = {f"p{share}": gaps[len(gaps) * share // 100] for share in (50, 99)}
    return {"steps": len(gaps), **percentiles, "slowest": gaps[-1]}


@click.command(help=__doc__)
@click.option("--target", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--draft", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--number", default=10_000, show_default=True, help="Requests.")
@click.option("--users", default=4, show_default=True, help="Who send them.")
@click.option("--seed", default=0, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), required=True)
def main(target: Path, draft: Path, number: int, users: int, seed: int, output: Path) -> None:
    """Command line; see the module."""
    flags = (*CPU_FLAGS, "--dtype", "float32", *dspark_flags(draft), "--chat-template", "chatml")
    # Made before anybody is timed.
    usual, odd = Bodies(seed + 1).usual(number // 10), Bodies(seed).some(number)
    with LaunchedServer(target, *flags, env=CPU_ENV) as server:
        quiet = alone(server.url, texts=10)
        with Neighbour(server.url) as beside_usual:
            usual_tally = send(server.url, usual, users)
        with Neighbour(server.url) as neighbour:
            tally = send(server.url, odd, users)
        after = alone(server.url, texts=1)
        if tally.ended:
            Console().print(server.log_tail(60), markup=False)
    report = {**provenance.record(), "seed": seed, "users": users, **report_of(tally, quiet, beside_usual, neighbour)}
    report["passed"] = report["passed"] and usual_tally.passed and after.texts[0] == quiet.texts[0]
    output.parent.mkdir(parents=True, exist_ok=True)
    provenance.write_json(output, report)
    Console().print(report)
    sys.exit(0 if report["passed"] else 1)


if __name__ == "__main__":
    main()
