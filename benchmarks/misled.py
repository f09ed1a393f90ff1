"""Measure in simulated time what misleads the policy ``auto``: texts, confidence heads and step times.

    python benchmarks/misled.py --output benchmarks/results/adversarial

Every case is one kind of text, confidence head, load and error of the step times, on three machines. Its figure is the
throughput of ``auto`` over that of the best fixed number of drafts, which is chosen in hindsight, once for the whole
run. The tokens of a step are those that its drafts are expected to bring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import click
import numpy as np
import pandas as pd
from rich.progress import track
from simulated import GAMMA, MACHINES, Floats, Invented, Loop, Traffic

from sglang_dspark.config import DSparkConfig
from sglang_dspark.scheduling.sps_table import SpsTable
from sglang_dspark.tools import provenance

ONE_ANSWER = 1 << 30
Head = Callable[[Floats], Floats] | None


@dataclass(frozen=True)
class Case:
    """Traffic of so many users for so many steps."""

    traffic: Traffic
    users: int = 1
    steps: int = 500


def shows(probability: float) -> Head:
    """Return a head that shows one probability for all drafts."""
    return lambda logits: np.full_like(logits, np.log(probability / (1 - probability)))


def scaled(plain: float, drafted: float) -> Callable[[SpsTable, int], SpsTable]:
    """Return what makes plain or drafted steps look slower by a factor."""
    factors = np.where(np.arange(GAMMA + 1) == 0, plain, drafted)[None, :, None]
    return lambda table, seed: replace(table, draft_ms=table.draft_ms * drafted, verify_ms=table.verify_ms * factors)


def _text(rate: float | Callable[[int], float], head: Head, answer_steps: int = ONE_ANSWER) -> Traffic:
    return Traffic(lambda: [Invented(rate, head)], answer_steps=answer_steps)


def _turns(head: Head, steps: int, every: int) -> Case:
    """Return a text that is hard and easy in turns."""
    rates = [(0.05, 0.95)[turn % 2] for turn in range(steps // every)]
    return Case(Traffic(lambda: [Invented(rate, head) for rate in rates], answer_steps=ONE_ANSWER), steps=steps)


def _cases() -> Iterator[tuple[str, Case]]:
    careful, sure = shows(0.1), shows(0.97)
    heads: dict[str, Head] = {"exact": lambda logits: logits, "blind": shows(0.6), "no": None}
    for steps in (64, 500, 2000):
        yield f"head much too careful, {steps} steps", Case(_text(0.9, careful), steps=steps)
    yield "head much too careful, 8 users", Case(_text(0.9, careful), users=8)
    yield "head much too careful, short answers", Case(_text(0.9, careful, 100), steps=2000)
    yield "head too careful", Case(_text(0.9, shows(0.3)))
    yield "inverted head", Case(_text(0.9, lambda logits: -logits))
    yield "inverted head, text that changes", _turns(lambda logits: -logits, 500, 100)
    for steps in (200, 1500):
        yield f"head too sure, {steps} steps", Case(_text(0.2, sure), steps=steps)
        yield f"all rejected, {steps} steps", Case(_text(0.05, sure), steps=steps)
    yield "head too sure, 8 users", Case(_text(0.2, sure), users=8, steps=200)
    yield "all rejected, 4 users", Case(_text(0.05, sure), users=4, steps=160)
    for name, head in heads.items():
        for every in (40, 150, 700):
            yield f"text changes every {every} steps, {name} head", _turns(head, 2800, every)
        for requests in (8, 24):
            runs = _text(lambda request, n=requests: (0.05, 0.9)[request // n % 2], head, 100)  # type: ignore[misc]
            case = Case(runs, steps=200 * requests)
            yield f"{requests} hard requests, then easy ones, {name} head", case
    for factor in (2.0, 3.0):
        for users, rate in ((1, 0.05), (1, 0.9), (8, 0.05), (8, 0.5), (8, 0.9)):
            for plain, drafted in ((factor, 1.0), (1.0, factor)):
                name = f"{'plain' if plain > 1 else 'drafted'} steps {factor:.0f} times too slow in the table"
                traffic = replace(_text(rate, heads["exact"]), believed=scaled(plain, drafted))
                yield f"{name}, {users} users, acceptance {rate}", Case(traffic, users=users)


CASES = dict(_cases())


def ratio(machine: str, case: Case, seed: int) -> float:
    """Return the throughput of ``auto`` over that of the best fixed length."""
    rate, _, fixed = Loop(machine, case.traffic, case.users, case.steps, seed, DSparkConfig()).run()
    return rate / max(fixed)


@click.command(help=__doc__)
@click.option("--output", type=click.Path(path_type=Path), required=True, help="Folder.")
@click.option("--seeds", default=2, show_default=True, help="Runs of every case.")
def main(output: Path, seeds: int) -> None:
    """Write the ratios."""
    output.mkdir(exist_ok=True)
    provenance.write_json(output / "provenance.json", provenance.record())
    ratios = {
        name: {machine: np.mean([ratio(machine, case, seed) for seed in range(seeds)]) for machine in MACHINES}
        for name, case in track(CASES.items(), "cases")
    }
    pd.DataFrame(ratios).T.to_csv(output / "adversarial.csv", index_label="case", float_format="%.3f")


if __name__ == "__main__":
    main()
