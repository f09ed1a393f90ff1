r"""Measure the policy ``auto`` in simulated time: what each of its parts brings, and what misleads it.

    python benchmarks/ablation.py parts --output benchmarks/results/ablation --first-seed 0
    python benchmarks/ablation.py misled --output benchmarks/results/adversarial

The results of several seeds of ``parts`` are added to the same folder.

Every case is a machine and a kind of traffic, at several loads, and every load is run once per seed with all parts and
once without each of them. All variants of a seed get the same blocks and the same noise of step times, so that they
differ by their decisions alone. A row also says what the best fixed number of drafts, and no speculation, would have
brought: chosen in hindsight, once for the whole run.

The tokens of a step are those that its drafts are expected to bring, where the probabilities are known, and those of
recorded blocks otherwise.

``misled`` compares with the best fixed length on misleading traffic. Every case is one kind of text, confidence head,
load and error of the step times, on three machines.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import numpy as np
import pandas as pd
from rich.progress import track
from serving.output import append_row
from simulated import GAMMA, MACHINES, Floats, Invented, Loop, Recorded, Traffic

from sglang_dspark.config import DSparkConfig
from sglang_dspark.files import atomic_write_text
from sglang_dspark.scheduling import auto_policy, forecast
from sglang_dspark.scheduling import schedule as schedule_module
from sglang_dspark.scheduling.auto_policy import AutoPolicy
from sglang_dspark.scheduling.forecast import Forecast
from sglang_dspark.scheduling.lagged_survival import LaggedSurvivals
from sglang_dspark.scheduling.sps_table import SpsTable
from sglang_dspark.scheduling.step_times import StepTimes
from sglang_dspark.tools import provenance

STEPS = {1: 1200, 2: 1000, 4: 800, 8: 600, 16: 500, 64: 400}
FEW_LOADS = (1, 8, 64)


def misread(table: SpsTable, seed: int) -> SpsTable:
    """Return ``table`` with a third of its cells wrong by 30 %, either way."""
    rng = np.random.default_rng(seed)
    shape = table.verify_ms.shape[:2]
    off = np.where(rng.random(shape) < 1 / 3, rng.choice([1.3, 1 / 1.3], size=shape), 1.0)
    return replace(table, verify_ms=table.verify_ms * off[:, :, None])


def _half(request: int) -> float:
    return 0.05 if request % 2 else 0.85


TRAFFIC: dict[str, tuple[Traffic, tuple[int, ...]]] = {
    "recorded text": (Traffic(lambda: [Recorded()]), tuple(STEPS)),
    "recorded text, no confidence head": (Traffic(lambda: [Recorded(head=False)]), FEW_LOADS),
    "one hard request among easy ones": (
        Traffic(lambda: [Invented(lambda request: 0.02 if request == 0 else 0.85)], answer_steps=1 << 30),
        (2, 8, 64),
    ),
    "half of the requests hard": (Traffic(lambda: [Invented(_half)]), (1, 4, 16)),
    "text that changes": (Traffic(lambda: [Invented(rate) for rate in (0.9, 0.1, 0.9)]), FEW_LOADS),
    "long answers, most of them hard": (
        Traffic(lambda: [Invented(lambda request: 0.9 if request % 4 == 1 else 0.03)], answer_steps=150),
        (1,),
    ),
    "hard text": (Traffic(lambda: [Invented(0.05)]), FEW_LOADS),
    "overconfident head": (Traffic(lambda: [Invented(0.3, lambda logits: logits + 3.0)]), FEW_LOADS),
    "underconfident head": (Traffic(lambda: [Invented(0.85, lambda logits: logits - 3.0)]), FEW_LOADS),
    "confidences exchanged": (
        Traffic(lambda: [Invented(_half, lambda logits: np.roll(logits, 1, axis=0))]),
        (2, 8, 64),
    ),
    "wrong step times": (Traffic(lambda: [Recorded()], believed=misread), FEW_LOADS),
    "hiccups": (Traffic(lambda: [Recorded()], hiccups=0.02), FEW_LOADS),
    "load that changes": (Traffic(lambda: [Recorded()], other_load=64), (1, 8)),
}
"""Traffic, and the loads at which it is of interest."""


# ---- parts


@contextmanager
def _patched(owner: Any, **attributes: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for name, value in attributes.items():
            stack.enter_context(patch.object(owner, name, value))
        yield


def _mean_gains(survivals: LaggedSurvivals, requests: int) -> Floats:
    """Value budgets by the mean survivals alone, as if all requests and rounds were alike."""
    mean = survivals.mean()
    values = np.zeros((len(survivals.depths), requests * len(mean) + 1))
    for row, depth in enumerate(survivals.depths):
        drafts = np.zeros(requests * len(mean))
        drafts[: requests * depth] = np.repeat(mean[:depth], requests)
        values[row, 1:] = drafts.cumsum()
    return values


PARTS: dict[str, Callable[[], Any]] = {
    "all parts": ExitStack,
    "step-time filter": lambda: _patched(StepTimes, observe=lambda *_: 0.0),
    "exploration": lambda: _patched(AutoPolicy, _alternative=lambda *_: None),
    "probes": lambda: _patched(AutoPolicy, _steps_to_probe=property(lambda _: 1 << 30, lambda *_: None)),
    "parking": lambda: _patched(auto_policy, MIN_ROUNDS=1 << 60),
    "lagged survivals": lambda: _patched(LaggedSurvivals, gains=_mean_gains),
    "re-prediction": lambda: _patched(LaggedSurvivals, revise=lambda *_: None),
    "draft lengths": lambda: _patched(schedule_module, draft_depths=lambda draft_ms: (draft_ms.shape[1] - 1,)),
    "leaving out, in a batch": lambda: _patched(AutoPolicy, min_acceptance=lambda *_: 0.0),
    "leaving out, alone": lambda: _patched(AutoPolicy, affords=lambda *_: True),
    "outcomes of single requests": lambda: _patched(forecast, as_shown=lambda survival, *_: survival),
    "first rounds at once": lambda: _patched(Forecast, _is_new_text=lambda *_: False),
    "batches of outcomes": lambda: _patched(forecast, UPDATE_STEPS=1),
    "weight of parked probes": lambda: _patched(auto_policy, PARKED_PROBE_WEIGHT=2),
    "evaluation for 8 steps": lambda: _patched(auto_policy, UPDATE_STEPS=1),
    "online calibration": ExitStack,  # an option of the server
}


def measure(machine: str, traffic: str, load: int, seed: int, parts: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row per part that is left out."""
    rows = []
    for part in parts:
        options = DSparkConfig(online_calibration=part != "online calibration")
        with PARTS[part]():
            rate, parked, fixed = Loop(machine, TRAFFIC[traffic][0], load, STEPS[load], seed, options).run()
        row = {"machine": machine, "traffic": traffic, "load": load, "seed": seed, "without": part}
        row |= {"tokens_per_s": 1e3 * rate, "parked": parked, "of_best_fixed": rate / max(fixed)}
        rows.append(row | {"of_plain": rate / fixed[0], "best_fixed": int(np.argmax(fixed))})
    return rows


# ---- what misleads it

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


# ---- commands


@click.group(help="Measures the policy auto in simulated time.")
def main() -> None:
    """Command line; see the module."""


@main.command(help="Leaves out one part at a time.")
@click.option("--output", type=click.Path(path_type=Path), required=True, help="Folder.")
@click.option("--seeds", default=1, show_default=True, help="Runs of every case.")
@click.option("--first-seed", default=0, show_default=True, help="Seed of the first of them.")
@click.option("--only", default="", help="Traffic to run, by a part of its name.")
@click.option("--part", type=click.Choice(list(PARTS)), multiple=True, help="To leave out; all by default.")
def parts(output: Path, seeds: int, first_seed: int, only: str, part: tuple[str, ...]) -> None:
    """Write what the throughput is without each part."""
    seed_range = range(first_seed, first_seed + seeds)
    left_out = ["all parts", *(part or list(PARTS)[1:])]
    cases = [
        (kind, name, load, seed)
        for seed, kind, (name, (_, loads)) in product(seed_range, MACHINES, TRAFFIC.items())
        if only in name
        for load in loads
    ]
    output.mkdir(exist_ok=True)
    for case in track(cases, "cases"):
        for row in measure(*case, left_out):
            append_row(output / "ablation.csv", row)
    record = output / "provenance.json"
    earlier = json.loads(record.read_text(encoding="utf-8")) if record.exists() else []
    atomic_write_text(record, json.dumps([*earlier, provenance.record()], indent=2) + "\n")


@main.command(help="Compares auto with the best fixed length on misleading traffic.")
@click.option("--output", type=click.Path(path_type=Path), required=True, help="Folder.")
@click.option("--seeds", default=2, show_default=True, help="Runs of every case.")
def misled(output: Path, seeds: int) -> None:
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
