r"""Measure what each part of the policy ``auto`` brings: a server in simulated time, with one part off at a time.

    python benchmarks/ablation.py --output benchmarks/results/ablation --first-seed 0

The results of several seeds are added to the same folder.

Every case is a machine and a kind of traffic, at several loads, and every load is run once per seed with all parts and
once without each of them. All variants of a seed get the same blocks and the same noise of step times, so that they
differ by their decisions alone. A row also says what the best fixed number of drafts, and no speculation, would have
brought: chosen in hindsight, once for the whole run.

The tokens of a step are those that its drafts are expected to bring, where the probabilities are known, and those of
recorded blocks otherwise.
"""

from __future__ import annotations

import csv
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import product, repeat
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import numpy as np
from formula_tables import compute_bound, memory_bound
from numpy.typing import NDArray
from rich.progress import track

from sglang_dspark.config import DSparkConfig
from sglang_dspark.files import atomic_write_text
from sglang_dspark.scheduling import auto_policy, forecast
from sglang_dspark.scheduling import schedule as schedule_module
from sglang_dspark.scheduling.auto_policy import AutoPolicy
from sglang_dspark.scheduling.forecast import Forecast
from sglang_dspark.scheduling.lagged_survival import LaggedSurvivals
from sglang_dspark.scheduling.request_acceptance import RequestAcceptance
from sglang_dspark.scheduling.sps_table import SpsTable
from sglang_dspark.scheduling.step_times import StepTimes
from sglang_dspark.step.decision import StepDecision
from sglang_dspark.step.record import StepRecord
from sglang_dspark.step.selection import FixedLength
from sglang_dspark.tools import provenance
from sglang_dspark.tools.simulator.blocks import RecordedBlocks
from sglang_dspark.tools.simulator.costs import Costs, Prefill
from sglang_dspark.tools.simulator.server import SimulatedServer
from sglang_dspark.tools.simulator.workload import Request

RESULTS = Path(__file__).parent / "results"
GAMMA = 5
CONTEXT = 200
LOADS = (1, 2, 4, 8, 16, 64)
FEW_LOADS = (1, 8, 64)
STEPS = {1: 1200, 2: 1000, 4: 800, 8: 600, 16: 500, 64: 400}
LAG = 2
NOISE = 0.03
FIELDS = (
    "machine",
    "traffic",
    "load",
    "seed",
    "without",
    "tokens_per_s",
    "parked",
    "of_best_fixed",
    "of_plain",
    "best_fixed",
)

Floats = NDArray[np.float64]


# ---- machines


def cpu_table() -> SpsTable:
    """Return the step times of the committed sweep."""
    return SpsTable.load(RESULTS / "sweep" / "sps.json")


def gpu_table() -> SpsTable:
    """Return formulas of a GPU on which blocks are drafted whole and steps have tiers."""
    tiers = [*range(1, 17), *(size * eighth // 8 for size in (16, 32, 64, 128, 256) for eighth in range(9, 17))]
    return memory_bound(gamma=GAMMA, tiers=tiers)


def costly_table() -> SpsTable:
    """Return formulas of a target whose every token costs, as one with experts does."""
    return compute_bound(gamma=GAMMA)


def misread(table: SpsTable, seed: int) -> SpsTable:
    """Return ``table`` with a third of its cells wrong by 30 %, either way."""
    rng = np.random.default_rng(seed)
    shape = table.verify_ms.shape[:2]
    off = np.where(rng.random(shape) < 1 / 3, rng.choice([1.3, 1 / 1.3], size=shape), 1.0)
    return replace(table, verify_ms=table.verify_ms * off[:, :, None])


# ---- texts


class Text:
    """Blocks of drafts, which remembers the survivals of those that it drew last.

    Attributes:
        survival: [n, gamma] probability that a draft is accepted; 0 or 1 for recorded blocks.
    """

    gamma = GAMMA
    name = "ablation"

    def __init__(self) -> None:
        self.survival: Floats = np.zeros((0, GAMMA))

    def draw(self, requests: Sequence[int], rng: np.random.Generator) -> tuple[Floats | None, NDArray[np.int64]]:
        """Draw a block for each of ``requests``; see :class:`BlockSource`."""
        raise NotImplementedError


class Recorded(Text):
    """The recorded blocks of the committed evaluation."""

    def __init__(self, *, head: bool = True) -> None:
        super().__init__()
        self._blocks = RecordedBlocks.load(RESULTS / "evaluation" / "blocks.jsonl")
        if not head:
            self._blocks = replace(self._blocks, logits=None)

    def draw(self, requests: Sequence[int], rng: np.random.Generator) -> tuple[Floats | None, NDArray[np.int64]]:
        logits, accepted = self._blocks.draw(requests, rng)
        self.survival = (accepted[:, None] > np.arange(GAMMA)).astype(float)
        return logits, accepted


class Invented(Text):
    """Blocks by a mean acceptance of each request.

    Args:
        rates: of requests by number.
        bias: added to the logits of the confidence head, which knows the acceptance otherwise.
        exchanged: whether every request shows the confidences of its neighbour.
    """

    def __init__(self, rates: Callable[[int], float], bias: float = 0.0, *, exchanged: bool = False) -> None:
        super().__init__()
        self._rates, self._bias, self._exchanged = rates, bias, exchanged

    def draw(self, requests: Sequence[int], rng: np.random.Generator) -> tuple[Floats | None, NDArray[np.int64]]:
        means = np.clip([[self._rates(request)] * GAMMA for request in requests], 1e-3, 1 - 1e-3)
        rates = np.clip(rng.beta(4 * means, 4 * (1 - means)), 1e-4, 1 - 1e-4)
        accepted = (rng.random(rates.shape) < rates).cumprod(1).sum(1)
        self.survival = rates.cumprod(1)
        logits = np.log(rates / (1 - rates)) + self._bias
        return (np.roll(logits, 1, axis=0) if self._exchanged else logits), accepted


# ---- traffic


@dataclass(frozen=True)
class Traffic:
    """The work of a server.

    Attributes:
        texts: one after the other, for equal parts of the run.
        other_load: requests of every second hundred of steps; None: the load stays.
        answer_steps: steps after which a request is replaced by the next one.
        wrong_table: the schedule is told wrong step times.
        hiccups: share of steps that take five times as long.
        loads: those that the traffic is of interest for.
    """

    texts: Callable[[], Sequence[Text]]
    other_load: int | None = None
    answer_steps: int = 50
    wrong_table: bool = False
    hiccups: float = 0.0
    loads: tuple[int, ...] = FEW_LOADS


def _constant(rate: float) -> Callable[[int], float]:
    return lambda request: rate


TRAFFIC = {
    "recorded text": Traffic(lambda: [Recorded()], loads=LOADS),
    "recorded text, no confidence head": Traffic(lambda: [Recorded(head=False)]),
    "one hard request among easy ones": Traffic(
        lambda: [Invented(lambda request: 0.02 if request == 0 else 0.85)], answer_steps=1 << 30, loads=(2, 8, 64)
    ),
    "half of the requests hard": Traffic(
        lambda: [Invented(lambda request: 0.05 if request % 2 else 0.85)], loads=(1, 4, 16)
    ),
    "text that changes": Traffic(lambda: [Invented(_constant(rate)) for rate in (0.9, 0.1, 0.9)]),
    "long answers, most of them hard": Traffic(
        lambda: [Invented(lambda request: 0.9 if request % 4 == 1 else 0.03)], answer_steps=150, loads=(1,)
    ),
    "hard text": Traffic(lambda: [Invented(_constant(0.05))]),
    "overconfident head": Traffic(lambda: [Invented(_constant(0.3), bias=3.0)]),
    "underconfident head": Traffic(lambda: [Invented(_constant(0.85), bias=-3.0)]),
    "confidences exchanged": Traffic(
        lambda: [Invented(lambda request: 0.05 if request % 2 else 0.85, exchanged=True)], loads=(2, 8, 64)
    ),
    "wrong step times": Traffic(lambda: [Recorded()], wrong_table=True),
    "hiccups": Traffic(lambda: [Recorded()], hiccups=0.02),
    "load that changes": Traffic(lambda: [Recorded()], other_load=64, loads=(1, 8)),
}
MACHINES = {"CPU": cpu_table, "GPU": gpu_table, "costly tokens": costly_table}


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


_min_acceptance = AutoPolicy.min_acceptance
PARTS: dict[str, Callable[[], Any]] = {
    "all parts": ExitStack,
    "step-time filter": lambda: _patched(StepTimes, observe=lambda *_: 0.0),
    "exploration": lambda: _patched(AutoPolicy, _alternative=lambda *_: None),
    "probes": lambda: _patched(AutoPolicy, _steps_to_probe=property(lambda _: 1 << 30, lambda *_: None)),
    "parking": lambda: _patched(auto_policy, MIN_ROUNDS=1 << 60),
    "lagged survivals": lambda: _patched(LaggedSurvivals, gains=_mean_gains),
    "re-prediction": lambda: _patched(LaggedSurvivals, revise=lambda *_: None),
    "draft lengths": lambda: _patched(schedule_module, draft_depths=lambda draft_ms: (draft_ms.shape[1] - 1,)),
    "leaving out, in a batch": lambda: _patched(
        AutoPolicy, min_acceptance=lambda self, n, *rest: _min_acceptance(self, n, *rest) if n == 1 else 0.0
    ),
    "leaving out, alone": lambda: _patched(
        AutoPolicy, min_acceptance=lambda self, n, *rest: _min_acceptance(self, n, *rest) if n > 1 else 0.0
    ),
    "drafts of a parked server": lambda: _patched(RequestAcceptance, above=lambda *_: []),
    "outcomes of single requests": lambda: _patched(forecast, as_shown=lambda survival, *_: survival),
    "first rounds at once": lambda: _patched(Forecast, _is_new_text=lambda *_: False),
    "batches of outcomes": lambda: _patched(forecast, UPDATE_STEPS=1),
    "weight of parked probes": lambda: _patched(auto_policy, PARKED_PROBE_WEIGHT=2),
    "evaluation for 8 steps": lambda: _patched(auto_policy, UPDATE_STEPS=1),
    "online calibration": ExitStack,  # an option of the server
}


# ---- the loop


@dataclass(frozen=True)
class SlowSteps(Costs):
    """Costs of a machine of which some steps take five times as long.

    Attributes:
        factors: of the steps, in order.
    """

    factors: Iterator[float] = field(default_factory=lambda: repeat(1.0))

    def step_ms(self, decision: StepDecision, requests: int, num_tokens: int, context: float, longest: int) -> float:
        return next(self.factors) * super().step_ms(decision, requests, num_tokens, context, longest)


class Loop:
    """A simulated server and the users of one traffic."""

    def __init__(self, machine: str, traffic: Traffic, load: int, seed: int, options: DSparkConfig) -> None:
        truth = MACHINES[machine]()
        believed = misread(truth, seed) if traffic.wrong_table else None
        self._traffic, self._load, self._steps = traffic, load, STEPS[load]
        self._texts = traffic.texts()
        slow = np.random.default_rng(seed).random(self._steps) < traffic.hiccups
        self._factors = np.where(slow, 5.0, 1.0)
        self._costs = Costs(truth, Prefill(0.0, 0.0), NOISE, believed)
        costs = SlowSteps(truth, Prefill(0.0, 0.0), NOISE, believed, iter(self._factors))
        self._server = SimulatedServer(costs, self._texts[0], options, seed=seed)
        self._fixed_ms: dict[int, list[float]] = {}

    def run(self) -> tuple[float, float, list[float]]:
        """Return tokens per ms of the policy, its share of parked steps, and tokens per ms of every fixed length."""
        tokens, ms, parked, fixed = 0.0, 0.0, 0, np.zeros((2, GAMMA + 1))
        behind: deque[tuple[StepRecord, NDArray[np.int64], list[int]]] = deque()
        ids: list[int] = []
        for step in range(self._steps):
            text = self._server.blocks = self._texts[step * len(self._texts) // self._steps]
            before, ids = ids, self._requests(step)
            if ids != before:
                self._server.prefill([])
            step_ms, result = self._server.decode([Request(index, CONTEXT, 1 << 30) for index in ids])
            assert result.record is not None, "a decode step has a record"
            survival = text.survival.cumsum(1)
            lens = result.record.verify_lens.numpy()
            tokens += len(ids) + float(survival[lens > 0, lens[lens > 0] - 1].sum())
            ms += step_ms
            parked += self._server.schedule.parked
            fixed[0] += len(ids) + np.concatenate([[0.0], survival.sum(0)])
            fixed[1] += np.multiply(self._fixed(len(ids)), self._factors[step])
            behind.append((result.record, result.accepted, ids))
            if len(behind) > LAG:
                self._observe(*behind.popleft(), ids)
        return tokens / ms, parked / self._steps, (fixed[0] / fixed[1]).tolist()

    def _observe(self, record: StepRecord, accepted: NDArray[np.int64], ids: list[int], now: list[int]) -> None:
        """Show the schedule an earlier step, as far as its requests are still running."""
        running = [place for place, index in enumerate(ids) if index in now]
        self._server.schedule.observe(record, running, accepted[running].tolist())

    def _requests(self, step: int) -> list[int]:
        """Return the numbers of the running requests: each ends after so many steps, and one more begins."""
        load = self._load
        if self._traffic.other_load is not None and step // 100 % 2:
            load = self._traffic.other_load
        each = self._traffic.answer_steps
        return [place + load * ((step + place * each // load) // each) for place in range(load)]

    def _fixed(self, requests: int) -> list[float]:
        """Return milliseconds of a step by its fixed number of drafts."""
        if requests not in self._fixed_ms:
            self._fixed_ms[requests] = [
                self._costs.step_ms(
                    StepDecision(drafts, FixedLength()), requests, requests * (1 + drafts), CONTEXT, drafts
                )
                for drafts in range(GAMMA + 1)
            ]
        return self._fixed_ms[requests]


def measure(machine: str, traffic: str, load: int, seed: int, parts: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row per part that is left out."""
    rows = []
    for part in parts:
        options = DSparkConfig(online_calibration=part != "online calibration")
        with PARTS[part]():
            rate, parked, fixed = Loop(machine, TRAFFIC[traffic], load, seed, options).run()
        row = {"machine": machine, "traffic": traffic, "load": load, "seed": seed, "without": part}
        rows.append(
            {
                **row,
                "tokens_per_s": round(1e3 * rate, 3),
                "parked": round(parked, 3),
                "of_best_fixed": round(rate / max(fixed), 4),
                "of_plain": round(rate / fixed[0], 4),
                "best_fixed": int(np.argmax(fixed)),
            }
        )
    return rows


@click.command(help="Leaves out one part of the policy auto at a time, in simulated time.")
@click.option("--output", type=click.Path(path_type=Path), required=True, help="Folder.")
@click.option("--seeds", default=1, show_default=True, help="Runs of every case.")
@click.option("--first-seed", default=0, show_default=True, help="Seed of the first of them.")
@click.option("--only", default="", help="Traffic to run, by a part of its name.")
@click.option("--machine", type=click.Choice(list(MACHINES)), multiple=True, help="All by default.")
@click.option("--part", type=click.Choice(list(PARTS)), multiple=True, help="To leave out; all by default.")
def main(output: Path, seeds: int, first_seed: int, only: str, machine: tuple[str, ...], part: tuple[str, ...]) -> None:
    """Command line; see the module."""
    seed_range = range(first_seed, first_seed + seeds)
    parts = ["all parts", *(part or list(PARTS)[1:])]
    cases = [
        (kind, name, load, seed)
        for seed, kind, (name, traffic) in product(seed_range, machine or MACHINES, TRAFFIC.items())
        if only in name
        for load in traffic.loads
    ]
    output.mkdir(exist_ok=True)
    with (output / "ablation.csv").open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        if not file.tell():
            writer.writeheader()
        for case in track(cases, "cases"):
            writer.writerows(measure(*case, parts))
            file.flush()
    record = output / "provenance.json"
    earlier = json.loads(record.read_text(encoding="utf-8")) if record.exists() else []
    atomic_write_text(record, json.dumps([*earlier, provenance.record()], indent=2) + "\n")


if __name__ == "__main__":
    main()
