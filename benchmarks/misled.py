"""Measure in simulated time what misleads the policy ``auto``: texts, confidence heads and step times.

    python benchmarks/misled.py --output benchmarks/results/adversarial

Every case is one kind of text, confidence head, load and error of the step times, on three machines. Its figure is the
throughput of ``auto`` over that of the best fixed number of drafts, which is chosen in hindsight, once for the whole
run. The tokens of a step are those that its drafts are expected to bring.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click
import numpy as np
import pandas as pd
from formula_tables import compute_bound, memory_bound
from numpy.typing import NDArray
from rich.progress import track

from sglang_dspark.config import DSparkConfig
from sglang_dspark.scheduling.sps_table import SpsTable
from sglang_dspark.step.decision import StepDecision
from sglang_dspark.step.selection import FixedLength
from sglang_dspark.tools import provenance
from sglang_dspark.tools.simulator.server import Costs, Prefill, SimulatedServer
from sglang_dspark.tools.simulator.workload import Request

GAMMA = 5
CONTEXT = 200
LAG = 2
"""Steps until the schedule sees an outcome."""
NOISE = 0.03
ONE_ANSWER = 1 << 30

Floats = NDArray[np.float64]
Head = Callable[[Floats], Floats] | None
"""What the confidence head shows of the true logits [n, gamma]; None: there is none."""
Rate = float | Callable[[int], float]
"""The mean acceptance of all requests, or of each by its number."""


# ---- machines


def cpu_table() -> SpsTable:
    """Return the step times of the committed sweep."""
    return SpsTable.load(Path(__file__).parent / "results" / "sweep" / "sps.json")


def gpu_table() -> SpsTable:
    """Return formulas of a GPU on which blocks are drafted whole and steps have tiers."""
    tiers = [*range(1, 17), *(size * eighth // 8 for size in (16, 32, 64, 128, 256) for eighth in range(9, 17))]
    return memory_bound(gamma=GAMMA, tiers=tiers)


def costly_table() -> SpsTable:
    """Return formulas of a target whose every token costs, as one with experts does."""
    return compute_bound(gamma=GAMMA)


MACHINES = {"CPU": cpu_table, "GPU": gpu_table, "costly tokens": costly_table}


# ---- cases


def exact(logits: Floats) -> Floats:
    """Show what is true."""
    return logits


def inverted(logits: Floats) -> Floats:
    """Show the opposite."""
    return -logits


def shows(probability: float) -> Head:
    """Return a head that shows one probability for all drafts."""
    return lambda logits: np.full_like(logits, np.log(probability / (1 - probability)))


def scaled(plain: float, drafted: float) -> Callable[[SpsTable], SpsTable]:
    """Return what makes plain or drafted steps look slower by a factor."""
    factors = np.where(np.arange(GAMMA + 1) == 0, plain, drafted)[None, :, None]
    return lambda table: replace(table, draft_ms=table.draft_ms * drafted, verify_ms=table.verify_ms * factors)


@dataclass(frozen=True)
class Case:
    """The work of a server.

    Attributes:
        rates: of texts, one after the other for equal parts of the run.
        answer_steps: steps after which a request is replaced by the next one.
        believed: makes the step times that the schedule is told of the true ones; None: it is told these.
    """

    rates: Sequence[Rate]
    head: Head
    users: int = 1
    steps: int = 500
    answer_steps: int = ONE_ANSWER
    believed: Callable[[SpsTable], SpsTable] | None = None

    def requests(self, step: int) -> list[int]:
        """Return the numbers of the running requests: each ends after so many steps, and one more begins."""
        users, each = self.users, self.answer_steps
        return [place + users * ((step + place * each // users) // each) for place in range(users)]


def _turns(head: Head, steps: int, every: int) -> Case:
    """Return a text that is hard and easy in turns."""
    return Case([(0.05, 0.95)[turn % 2] for turn in range(steps // every)], head, steps=steps)


def _cases() -> Iterator[tuple[str, Case]]:
    careful, sure = shows(0.1), shows(0.97)
    heads: dict[str, Head] = {"exact": exact, "blind": shows(0.6), "no": None}
    for steps in (64, 500, 2000):
        yield f"head much too careful, {steps} steps", Case([0.9], careful, steps=steps)
    yield "head much too careful, 8 users", Case([0.9], careful, users=8)
    yield "head much too careful, short answers", Case([0.9], careful, steps=2000, answer_steps=100)
    yield "head too careful", Case([0.9], shows(0.3))
    yield "inverted head", Case([0.9], inverted)
    yield "inverted head, text that changes", _turns(inverted, 500, 100)
    for steps in (200, 1500):
        yield f"head too sure, {steps} steps", Case([0.2], sure, steps=steps)
        yield f"all rejected, {steps} steps", Case([0.05], sure, steps=steps)
    yield "head too sure, 8 users", Case([0.2], sure, users=8, steps=200)
    yield "all rejected, 4 users", Case([0.05], sure, users=4, steps=160)
    for name, head in heads.items():
        for every in (40, 150, 700):
            yield f"text changes every {every} steps, {name} head", _turns(head, 2800, every)
        for run in (8, 24):
            rates = [lambda request, run=run: (0.05, 0.9)[request // run % 2]]
            case = Case(rates, head, steps=200 * run, answer_steps=100)
            yield f"{run} hard requests, then easy ones, {name} head", case
    for factor in (2.0, 3.0):
        for users, rate in ((1, 0.05), (1, 0.9), (8, 0.05), (8, 0.5), (8, 0.9)):
            for plain, drafted in ((factor, 1.0), (1.0, factor)):
                name = f"{'plain' if plain > 1 else 'drafted'} steps {factor:.0f} times too slow in the table"
                case = Case([rate], exact, users, believed=scaled(plain, drafted))
                yield f"{name}, {users} users, acceptance {rate}", case


CASES = dict(_cases())


# ---- the loop


class Drafts:
    """Blocks drawn from a mean acceptance of each request.

    Attributes:
        survival: [n, gamma] probability that a draft of the last blocks is accepted.
    """

    gamma, name = GAMMA, "drafts of a case"

    def __init__(self, rate: Rate, head: Head) -> None:
        self._rate, self._head = rate if callable(rate) else lambda request: rate, head
        self.survival: Floats = np.zeros((0, GAMMA))

    def draw(self, requests: Sequence[int], rng: np.random.Generator) -> tuple[Floats | None, NDArray[np.int64]]:
        """Draw a block for each of ``requests``; see :class:`BlockSource`."""
        means = np.clip([[self._rate(request)] * GAMMA for request in requests], 1e-3, 1 - 1e-3)
        rates = np.clip(rng.beta(4 * means, 4 * (1 - means)), 1e-4, 1 - 1e-4)
        accepted = (rng.random(rates.shape) < rates).cumprod(1).sum(1)
        self.survival = rates.cumprod(1)
        return None if self._head is None else self._head(np.log(rates / (1 - rates))), accepted


def ratio(machine: str, case: Case, seed: int) -> float:
    """Return the throughput of ``auto`` over that of the best fixed length."""
    truth = MACHINES[machine]()
    costs = Costs(truth, Prefill(0.0), NOISE, case.believed and case.believed(truth))
    texts = [Drafts(rate, case.head) for rate in case.rates]
    server = SimulatedServer(costs, texts[0], DSparkConfig(), seed=seed)
    # Of every fixed number of drafts.
    fixed_tokens = np.zeros(GAMMA + 1)
    fixed_ms = np.array([_fixed_ms(costs, case.users, drafts) for drafts in range(GAMMA + 1)])
    tokens, ms, pending, ids = 0.0, 0.0, deque(), list[int]()
    for step in range(case.steps):
        text = server.blocks = texts[step * len(texts) // case.steps]
        before, ids = ids, case.requests(step)
        if ids != before:
            server.interrupt()
        result = server.decode([Request(index, CONTEXT, ONE_ANSWER) for index in ids])
        assert result.record is not None, "a decode step has a record"
        expected = np.hstack([np.ones((len(ids), 1)), text.survival]).cumsum(1)
        tokens += float(expected[range(len(ids)), result.record.verify_lens].sum())
        ms += result.ms
        fixed_tokens += expected.sum(0)
        pending.append((result, ids))
        if len(pending) > LAG:  # what it shows of requests that are still running
            earlier, then = pending.popleft()
            running = [place for place, index in enumerate(then) if index in ids]
            server.schedule.observe(earlier.record, running, earlier.accepted[running].tolist())
    return tokens / ms / float((fixed_tokens / (fixed_ms * case.steps)).max())


def _fixed_ms(costs: Costs, users: int, drafts: int) -> float:
    return costs.step_ms(StepDecision(drafts, FixedLength()), users, users * (1 + drafts), CONTEXT, drafts)


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
