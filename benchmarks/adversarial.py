r"""Compare the policy ``auto`` with the best fixed draft length on misleading traffic, in simulated time.

    python benchmarks/adversarial.py --output benchmarks/results/adversarial/now.csv

``before.csv`` beside it is of commit e272f77.

Every case is one kind of text, confidence head, load and error of the step times, on three machines. The best fixed
length, no speculation among them, is chosen in hindsight, once for the whole case.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click
import numpy as np
import pandas as pd
from formula_tables import GAMMA, compute_bound, make_table
from numpy.typing import NDArray
from rich.progress import track

from sglang_dspark.config import DSparkConfig
from sglang_dspark.scheduling.sps_table import SpsTable
from sglang_dspark.step.decision import StepDecision
from sglang_dspark.step.record import StepRecord
from sglang_dspark.step.selection import FixedLength
from sglang_dspark.tools.simulator.costs import Costs, Prefill
from sglang_dspark.tools.simulator.server import SimulatedServer
from sglang_dspark.tools.simulator.workload import Request

CONTEXT, LAG, NOISE = 300, 2, 0.02

Floats = NDArray[np.float64]
Rate = Callable[[int, float], float]
"""Acceptance of every draft, by the request's number and the tokens so far."""
Head = Callable[[float], float] | None
"""Probability that the confidence head shows, by the true one."""


def gpu_table(plain_ms: float, draft_ms: float) -> SpsTable:
    """Return the times of a GPU on which the tokens of a few requests are nearly free."""

    def verify_ms(requests: Floats, drafts: Floats, context: Floats) -> Floats:
        tokens = requests * (1 + drafts)
        return plain_ms + 4e-3 * np.maximum(tokens - 128, 0) + 5e-4 * tokens + 2e-6 * requests * context

    return make_table(verify_ms, lambda requests, drafts, context: draft_ms + 0 * requests)


MACHINES = {"small GPU model": gpu_table(1.1, 0.8), "8B GPU model": gpu_table(5.0, 0.8), "CPU": compute_bound()}


class Text:
    """Blocks of drafts whose acceptance is known; see :class:`BlockSource`.

    Attributes:
        done: tokens that each user has got.
        gains: [n, gamma] expected accepted drafts of the last blocks, by drafts verified.
    """

    gamma, name = GAMMA, "adversarial"

    def __init__(self, rate: Rate, head: Head) -> None:
        self._rate, self._head, self.done = rate, head, 0.0
        self.gains: Floats = np.zeros((0, GAMMA))

    def draw(self, requests: Sequence[int], rng: np.random.Generator) -> tuple[Floats | None, NDArray[np.int64]]:
        """Draw a block for each of ``requests``."""
        rates = np.array([[self._rate(request, self.done)] * GAMMA for request in requests])
        self.gains = rates.cumprod(1).cumsum(1)
        accepted = (rng.random(rates.shape) < rates).cumprod(1).sum(1)
        if self._head is None:
            return None, accepted
        shown = np.vectorize(self._head)(rates)
        return np.log(shown / (1 - shown)) + 0.3 * rng.standard_normal(rates.shape), accepted


@dataclass(frozen=True)
class Case:
    """Traffic of a server.

    Attributes:
        users: requests that run at a time.
        tokens: tokens for each user until the case ends.
        answer: tokens after which a user sends the next request; None if all are one answer.
        plain, drafted: factors of plain and drafted steps in the table that the schedule is told.
    """

    rate: Rate
    head: Head
    users: int = 1
    tokens: int = 2048
    answer: int | None = None
    plain: float = 1.0
    drafted: float = 1.0

    def believed(self, truth: SpsTable) -> SpsTable:
        """Return the table that the schedule is told."""
        factors = np.where(np.arange(GAMMA + 1) == 0, self.plain, self.drafted)[None, :, None]
        return replace(truth, draft_ms=truth.draft_ms * self.drafted, verify_ms=truth.verify_ms * factors)


def _constant(rate: float) -> Rate:
    return lambda request, done: rate


def _turns(tokens: int) -> Rate:
    return lambda request, done: (0.05, 0.95)[int(done // tokens) % 2]


def _runs(requests: int) -> Rate:
    return lambda request, done: (0.05, 0.9)[request // requests % 2]


def _cases() -> Iterator[tuple[str, Case]]:
    easy, hard, rejected = _constant(0.9), _constant(0.2), _constant(0.05)
    careful, sure, blind = (lambda p: 0.1), (lambda p: 0.97), (lambda p: 0.6)
    heads: dict[str, Head] = {"exact": lambda p: p, "blind": blind, "no": None}
    for tokens in (256, 2048, 8000):
        yield f"head much too careful, {tokens} tokens", Case(easy, careful, tokens=tokens)
    yield "head much too careful, 8 users", Case(easy, careful, users=8)
    yield "head much too careful, short answers", Case(easy, careful, tokens=8000, answer=400)
    yield "head too careful", Case(easy, lambda p: 0.3)
    yield "inverted head", Case(easy, lambda p: 1 - p)
    yield "inverted head, text that changes", Case(_turns(400), lambda p: 1 - p)
    for tokens in (256, 2048):
        yield f"head too sure, {tokens} tokens", Case(hard, sure, tokens=tokens)
    yield "head too sure, 8 users", Case(hard, sure, users=8, tokens=256)
    for tokens in (200, 2048):
        yield f"all rejected, {tokens} tokens", Case(rejected, sure, tokens=tokens)
    yield "all rejected, 4 users", Case(rejected, sure, users=4, tokens=200)
    for name, head in heads.items():
        for tokens in (100, 400, 2000):
            yield f"text changes every {tokens} tokens, {name} head", Case(_turns(tokens), head, tokens=8000)
        for requests in (8, 24):
            rate, tokens = _runs(requests), 1024 * requests
            yield f"{requests} hard requests, then easy ones, {name} head", Case(rate, head, tokens=tokens, answer=256)
    for factor in (2.0, 3.0):
        for users, rate in ((1, 0.05), (1, 0.9), (8, 0.05), (8, 0.5), (8, 0.9)):
            for plain, drafted in ((factor, 1.0), (1.0, factor)):
                name = f"{'plain' if plain > 1 else 'drafted'} steps {factor:.0f} times too slow in the table"
                case = Case(_constant(rate), heads["exact"], users=users, plain=plain, drafted=drafted)
                yield f"{name}, {users} users, acceptance {rate}", case


CASES = dict(_cases())


def ratio(machine: str, case: Case, seed: int) -> float:
    """Return the throughput of ``auto`` over that of the best fixed length."""
    truth, users = MACHINES[machine], case.users
    costs = Costs(truth, Prefill(0.0, 0.0), NOISE, case.believed(truth))
    text = Text(case.rate, case.head)
    server = SimulatedServer(costs, text, DSparkConfig(), seed=seed)
    ids, answered, ms = list(range(users)), np.zeros(users), 0.0
    behind: deque[tuple[StepRecord, NDArray[np.int64], list[int]]] = deque()
    while text.done < case.tokens:
        step_ms, result = server.decode([Request(index, CONTEXT, 1 << 30) for index in ids])
        assert result.record is not None, "a decode step has a record"
        lens = result.record.verify_lens.numpy()
        tokens = 1 + np.where(lens > 0, text.gains[np.arange(users), lens - 1], 0.0)
        text.done += float(tokens.mean())
        ms += step_ms
        behind.append((result.record, result.accepted, ids))
        answered += tokens
        if case.answer is not None and (ended := answered >= case.answer).any():
            ids = [max(ids) + 1 + place if ended[place] else index for place, index in enumerate(ids)]
            answered[ended] = 0.0
            server.prefill([])
        if len(behind) > LAG:
            record, accepted, then = behind.popleft()
            running = [place for place, index in enumerate(then) if index in ids]
            if running:
                server.schedule.observe(record, running, accepted[running].tolist())
    return min(_fixed_ms(case, costs, drafts, text.done) for drafts in range(GAMMA + 1)) / ms


def _fixed_ms(case: Case, costs: Costs, drafts: int, tokens: float) -> float:
    """Return the milliseconds in which ``drafts`` drafts in every step bring each user so many tokens."""
    decision, users = StepDecision(drafts, FixedLength()), case.users
    step_ms = costs.step_ms(decision, users, users * (1 + drafts), CONTEXT, drafts)
    done, answered, request, ms = 0.0, 0.0, 0, 0.0
    while done < tokens:
        rate = case.rate(request, done)
        step = 1 + sum(rate**place for place in range(1, drafts + 1))
        done, answered, ms = done + step, answered + step, ms + step_ms
        if case.answer is not None and answered >= case.answer:
            request, answered = request + 1, 0.0
    return ms * tokens / done


@click.command(help="Compares auto with the best fixed length on misleading traffic, in simulated time.")
@click.option("--output", type=click.Path(path_type=Path), required=True, help="CSV file.")
@click.option("--seeds", default=2, show_default=True, help="Runs of every case.")
def main(output: Path, seeds: int) -> None:
    """Command line; see the module."""
    rows = []
    for name, case in track(CASES.items(), "cases"):
        ratios = {
            machine: round(float(np.mean([ratio(machine, case, seed) for seed in range(seeds)])), 3)
            for machine in MACHINES
        }
        rows.append({"case": name, **ratios})
    pd.DataFrame(rows).to_csv(output, index=False, lineterminator="\n")


if __name__ == "__main__":
    main()
