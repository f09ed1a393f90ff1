"""A server in simulated time, and traffic whose drafts are recorded or invented, for misled.py."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
from formula_tables import compute_bound, memory_bound
from numpy.typing import NDArray

from sglang_dspark.config import DSparkConfig
from sglang_dspark.scheduling.sps_table import SpsTable
from sglang_dspark.step.decision import StepDecision
from sglang_dspark.step.record import StepRecord
from sglang_dspark.step.selection import FixedLength
from sglang_dspark.tools.simulator.blocks import RecordedBlocks
from sglang_dspark.tools.simulator.costs import Costs, Prefill
from sglang_dspark.tools.simulator.server import SimulatedServer
from sglang_dspark.tools.simulator.workload import Request

RESULTS = Path(__file__).parent / "results"
GAMMA = 5
CONTEXT = 200
LAG = 2
NOISE = 0.03

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


MACHINES = {"CPU": cpu_table, "GPU": gpu_table, "costly tokens": costly_table}


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
    """Recorded blocks, those of the committed evaluation by default, with what the drafter said of them or without."""

    def __init__(self, *, head: bool = True, file: Path = RESULTS / "evaluation" / "blocks.jsonl") -> None:
        super().__init__()
        self._blocks = RecordedBlocks.load(file)
        if not head:
            self._blocks = replace(self._blocks, logits=None)

    def draw(self, requests: Sequence[int], rng: np.random.Generator) -> tuple[Floats | None, NDArray[np.int64]]:
        logits, accepted = self._blocks.draw(requests, rng)
        self.survival = (accepted[:, None] > np.arange(GAMMA)).astype(float)
        return logits, accepted


class Invented(Text):
    """Blocks by a mean acceptance of each request.

    Args:
        rates: of requests by number, or of all.
        head: what the confidence head shows of the true logits [n, gamma]; None: there is none.
    """

    def __init__(
        self, rates: float | Callable[[int], float], head: Callable[[Floats], Floats] | None = lambda logits: logits
    ) -> None:
        super().__init__()
        self._rates, self._head = rates if callable(rates) else lambda request: rates, head

    def draw(self, requests: Sequence[int], rng: np.random.Generator) -> tuple[Floats | None, NDArray[np.int64]]:
        means = np.clip([[self._rates(request)] * GAMMA for request in requests], 1e-3, 1 - 1e-3)
        rates = np.clip(rng.beta(4 * means, 4 * (1 - means)), 1e-4, 1 - 1e-4)
        accepted = (rng.random(rates.shape) < rates).cumprod(1).sum(1)
        self.survival = rates.cumprod(1)
        return None if self._head is None else self._head(np.log(rates / (1 - rates))), accepted


# ---- traffic


@dataclass(frozen=True)
class Traffic:
    """The work of a server.

    Attributes:
        texts: one after the other, for equal parts of the run.
        other_load: requests of every second hundred of steps; None: the load stays.
        answer_steps: steps after which a request is replaced by the next one.
        believed: makes the step times that the schedule is told of the true ones and a seed; None: it is told these.
        hiccups: share of steps that take five times as long.
    """

    texts: Callable[[], Sequence[Text]]
    other_load: int | None = None
    answer_steps: int = 50
    believed: Callable[[SpsTable, int], SpsTable] | None = None
    hiccups: float = 0.0


# ---- the loop


@dataclass(frozen=True)
class SlowSteps(Costs):
    """Costs of a machine of which some steps take five times as long.

    Attributes:
        factors: of the steps, in order.
    """

    factors: Iterator[float] = field(default_factory=lambda: repeat(1.0))

    def step_ms(self, decision: StepDecision, requests: int, *load: Any) -> float:
        return next(self.factors) * super().step_ms(decision, requests, *load)


class Loop:
    """A simulated server and the users of one traffic."""

    def __init__(self, machine: str, traffic: Traffic, load: int, steps: int, seed: int, options: DSparkConfig) -> None:
        truth = MACHINES[machine]()
        believed = traffic.believed and traffic.believed(truth, seed)
        self._traffic, self._load, self._steps = traffic, load, steps
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
                self._server.interrupt()
            result = self._server.decode([Request(index, CONTEXT, 1 << 30) for index in ids])
            assert result.record is not None, "a decode step has a record"
            survival = text.survival.cumsum(1)
            lens = result.record.verify_lens.numpy()
            tokens += len(ids) + float(survival[lens > 0, lens[lens > 0] - 1].sum())
            ms += result.ms
            parked += self._server.schedule.parked
            fixed[0] += len(ids) + np.concatenate([[0.0], survival.sum(0)])
            fixed[1] += np.multiply(self._fixed(len(ids)), self._factors[step])
            behind.append((result.record, result.accepted, ids))
            if len(behind) > LAG:
                self._observe(*behind.popleft(), ids)
        return tokens / ms, parked / self._steps, (fixed[0] / fixed[1]).tolist()

    def _observe(self, rounds: StepRecord, accepted: NDArray[np.int64], ids: list[int], now: list[int]) -> None:
        """Show the schedule an earlier step, as far as its requests are still running."""
        running = [place for place, index in enumerate(ids) if index in now]
        self._server.schedule.observe(rounds, running, accepted[running].tolist())

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
