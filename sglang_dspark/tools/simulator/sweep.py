"""Simulations over loads and policies, and their page with sliders, for which everything was computed beforehand.

The smallest model in which speculation pays at a light load and loses at a heavy one: a step takes one unit of time as
long as its tokens fit the machine's capacity, and in proportion to them beyond: ``max(1, tokens / capacity)``. Every
request has the same acceptance: the i-th draft of a block (from 0) is accepted with probability ``first * decay ** i``,
given that all before it are. Plain decoding has one token per request and step, ``fixed`` verifies the whole block,
``scheduled`` as many drafts as give the most tokens per unit of time.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import product
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_dspark.config import POLICY_NAMES, DSparkConfig
from sglang_dspark.errors import ConfigError
from sglang_dspark.tools.simulator.server import Costs, Figures, Lanes, Outcome, SimulatedServer
from sglang_dspark.tools.simulator.workload import BlockSource, ConditionalAcceptance, Lengths, OwnBlocks, Workload

# Requests per user, and at least so many; half as many warm the schedule up.
REQUESTS_PER_USER, FEWEST_REQUESTS = 4, 32
# Requests and their steps that are kept for the page.
SHOWN_REQUESTS, SHOWN_STEPS = 4, 12
# Simulated speeds that differ by less are equal, as far as is known.
_CHANCE = 0.02


def parse_policy(text: str) -> DSparkConfig:
    """Return the options of ``auto``, ``early-stop``, ``off``, ``static:3`` or ``threshold:0.6``.

    Raises:
        ConfigError: it is none of them.
    """
    name, _, argument = text.partition(":")
    takes = {"static": "verify_len", "threshold": "confidence_threshold"}
    if name not in POLICY_NAMES or (argument and name not in takes):
        raise ConfigError(
            f"--policies: {text!r} is no policy; give some of auto, early-stop, off, static:N and "
            "threshold:P, with commas between them"
        )
    try:
        return DSparkConfig.resolve({"schedule": name} | ({takes[name]: argument} if argument else {}), env={})
    except ConfigError as error:
        raise ConfigError(f"--policies: {text!r}: {error}") from error


@dataclass(frozen=True)
class Conditions:
    """The conditions of all points of a sweep; see :class:`SimulatedServer` and :class:`Workload`."""

    costs: Costs
    blocks: BlockSource
    prompt: Lengths
    output: Lengths
    num_requests: int | None = None
    uniform: bool = False
    mixed_chunk: bool = False
    prompt_rows: int | None = None
    max_gap_ms: float | None = None
    long_prompt: int | None = None

    def workload(self, users: int) -> Workload:
        """Return so many requests as :attr:`num_requests` says, or enough for every user."""
        count = self.num_requests or max(FEWEST_REQUESTS, REQUESTS_PER_USER * users)
        return Workload(count, self.prompt, self.output, users, long_prompt=self.long_prompt)

    def server(self, policy: str) -> SimulatedServer:
        """Return a server of a policy that has seen nothing yet."""
        options = replace(parse_policy(policy), prompt_rows=self.prompt_rows, max_gap_ms=self.max_gap_ms)
        return SimulatedServer(self.costs, self.blocks, options, uniform=self.uniform, mixed_chunk=self.mixed_chunk)


@dataclass(frozen=True)
class Point:
    """One policy with a number of users, and a few of its steps."""

    policy: str
    users: int
    figures: Figures
    lanes: Lanes


def simulate_point(conditions: Conditions, policy: str, users: int) -> Point:
    """Warm the schedule up, as a server that has been running, and measure on blocks that all policies get."""
    workload = conditions.workload(users)
    server = conditions.server(policy)
    if not policy.startswith(("static", "off")):
        server.serve(replace(workload, num_requests=-(-workload.num_requests // 2)))
    server.blocks = OwnBlocks(conditions.blocks)
    outcome = server.serve(workload)
    return Point(policy, users, outcome.figures(), outcome.lanes(SHOWN_REQUESTS, SHOWN_STEPS))


def sweep(
    conditions: Conditions, policies: Sequence[str], users: Sequence[int], on_point: Callable[[], None] = lambda: None
) -> list[Point]:
    """Simulate every policy at every load."""
    points = []
    for policy, count in product(policies, users):
        points.append(simulate_point(conditions, policy, count))
        on_point()
    return points


def crossovers(points: Sequence[Point]) -> dict[str, float | None]:
    """Find the number of users from which on each policy is slower for one of them than the first policy.

    It is interpolated on logarithmic axes; None if a policy is as fast with the most users.
    """
    speeds: dict[str, dict[int, float]] = {}
    for point in points:
        speeds.setdefault(point.policy, {})[point.users] = point.figures.user_tok_s
    plain = speeds[points[0].policy]
    users, found = list(plain), dict[str, float | None]()
    for policy, ours in speeds.items():
        ratios = [speed / plain[count] for count, speed in ours.items()]
        logs = np.log(ratios)
        ahead = np.flatnonzero(logs >= 0)
        if ratios[-1] > 1 - _CHANCE:
            found[policy] = None
        elif not len(ahead):
            found[policy] = float(users[0])
        else:
            last = ahead[-1]
            share = logs[last] / (logs[last] - logs[last + 1])
            found[policy] = float(users[last] * (users[last + 1] / users[last]) ** share)
    return found


POLICIES = ("plain", "fixed", "scheduled")


@dataclass(frozen=True)
class ModelPoint:
    """A policy at a number of users.

    Attributes:
        verify_len: drafts verified per request and step.
        accept_length: tokens committed per request and step.
        user_speed: tokens per unit of time of one user; 1 is plain decoding on an idle machine.
        wasted: share of the verified drafts that are rejected.
    """

    verify_len: int
    accept_length: float
    user_speed: float
    wasted: float


@dataclass(frozen=True)
class CrossoverModel:
    """The model of the module's docstring.

    Attributes:
        first: acceptance of the first draft.
        decay: what the acceptance is multiplied by from draft to draft; a Markov head raises it.
        block: drafts per block.
        capacity: tokens that a step has room for at no extra cost.
    """

    first: float = 0.9
    decay: float = 0.95
    block: int = 7
    capacity: int = 128

    @property
    def survival(self) -> NDArray[np.float64]:
        """Return [block] the probability that a draft and all before it are accepted."""
        survival: NDArray[np.float64] = np.cumprod(self.first * self.decay ** np.arange(self.block))
        return survival

    def point(self, policy: str, users: int) -> ModelPoint:
        """Return the throughput of ``policy``, one of :data:`POLICIES`, with this many users."""
        if policy == "scheduled":
            lengths = (self._verifying(length, users) for length in range(self.block + 1))
            return max(lengths, key=lambda point: point.user_speed)
        return self._verifying(self.block if policy == "fixed" else 0, users)

    def _verifying(self, length: int, users: int) -> ModelPoint:
        accepted = float(self.survival[:length].sum())
        step = max(1.0, users * (1 + length) / self.capacity)
        wasted = 1 - accepted / length if length else 0.0
        return ModelPoint(length, 1 + accepted, (1 + accepted) / step, wasted)

    @property
    def crossover(self) -> float:
        """Return the users from which on whole blocks are slower than plain decoding.

        There the step of whole blocks, ``users (block + 1) / capacity``, takes as long as its accept length in plain
        steps, which still fit the capacity.
        """
        return self.point("fixed", 1).accept_length * self.capacity / (1 + self.block)


# Sliders of the crossover model.
FIRST = (0.5, 0.65, 0.8, 0.9, 0.95)
DECAY = (0.7, 0.85, 0.95, 1.0)
BLOCK = (3, 7, 15)
CAPACITY = (32, 64, 128, 256)
MODEL_USERS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def crossover_page() -> str:
    """Render the crossover model for every position of its sliders."""
    start, lanes, settings = CrossoverModel(), dict[str, Lanes](), []
    for model in (CrossoverModel(*values) for values in product(FIRST, DECAY, BLOCK, CAPACITY)):
        rows = []
        for policy in POLICIES:
            row = []
            for point in (model.point(policy, users) for users in MODEL_USERS):
                key = f"{model.first} {model.decay} {model.block} {point.verify_len}"
                if key not in lanes:
                    lanes[key] = _model_lanes(model, point.verify_len)
                row.append(_cell(point.user_speed, point.verify_len, point.accept_length, point.wasted, key))
            rows.append(row)
        settings.append({"crossovers": [None, model.crossover, None], "points": rows})
    axes = [
        _axis("Acceptance of a block's first draft", FIRST, start.first),
        _axis("Kept from draft to draft (a Markov head raises it)", DECAY, start.decay),
        _axis("Drafts per block", BLOCK, start.block),
        _axis("Tokens per step at no extra cost", CAPACITY, start.capacity),
    ]
    return _render(
        title="Where speculation pays: the crossover model",
        note="A step takes one unit of time until its tokens fill the machine, and then in proportion to them. Fixed "
        "verifies whole blocks; scheduled verifies as many drafts as give the most tokens per unit of time.",
        unit="tokens per unit of time",
        policies=list(POLICIES),
        users=MODEL_USERS,
        start=MODEL_USERS.index(16),
        axes=axes,
        settings=settings,
        lanes=lanes,
    )


def simulation_page(points: Sequence[Point], title: str, note: str) -> str:
    """Render a simulated sweep whose first policy is the plain one.

    Args:
        title, note: what was simulated.
    """
    found = crossovers(points)
    lanes, rows = {}, []
    for policy in found:
        row = []
        for point in (point for point in points if point.policy == policy):
            key, f = f"{policy} {point.users}", point.figures
            lanes[key] = point.lanes
            row.append(_cell(f.user_tok_s, f.verify_len, f.accept_length, f.wasted, key))
        rows.append(row)
    users = list(dict.fromkeys(point.users for point in points))
    return _render(
        title=title,
        note=note,
        unit="tokens per second",
        policies=list(found),
        users=users,
        start=len(users) // 2,
        axes=[],
        settings=[{"crossovers": list(found.values()), "points": rows}],
        lanes=lanes,
    )


def _model_lanes(model: CrossoverModel, verify_len: int) -> Lanes:
    """Draw steps of some requests that verify so many drafts; the same dice for all numbers of drafts."""
    conditional = tuple((model.first * model.decay ** np.arange(model.block)).tolist())
    source = ConditionalAcceptance(conditional, concentration=math.inf)
    accepted = source.draw(range(SHOWN_REQUESTS * SHOWN_STEPS), np.random.default_rng(1))[1].reshape(
        SHOWN_REQUESTS, SHOWN_STEPS
    )
    drafted = model.block if verify_len else 0
    return [[(drafted, verify_len, min(int(count), verify_len)) for count in row] for row in accepted]


def _cell(user: float, verified: float, accept: float, wasted: float, lanes: str) -> list[Any]:
    return [*(round(value, 4) for value in (user, verified, accept, wasted)), lanes]


def _axis(label: str, values: Sequence[float], start: float) -> dict[str, Any]:
    return {"label": label, "values": [f"{value:g}" for value in values], "start": values.index(start)}


def _render(**data: Any) -> str:
    template = files("sglang_dspark.tools.simulator").joinpath("page.html").read_text(encoding="utf-8")
    # Within a script element only this could end it.
    content = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    return template.replace("DATA", content, 1)


SLO_REQUESTS_PER_USER = 6


@dataclass(frozen=True)
class SloPoint:
    """A load under ``auto``, of which every second user has an SLO of time per token.

    Attributes:
        users: their number.
        tpot_ms: the SLO.
        met: share of the answers to these users that meet it.
        met_before: share that is as fast where no user has an SLO.
        speed: tokens of all users per second, over those where no user has an SLO.
        other_tpot_ms, other_tpot_before_ms: mean time per token of the other users, and where no user has an SLO.
    """

    users: int
    tpot_ms: float
    met: float
    met_before: float
    speed: float
    other_tpot_ms: float
    other_tpot_before_ms: float


def simulate_slo(conditions: Conditions, users: int, share: float) -> SloPoint:
    """Serve the same requests without SLOs, and with one of so much of the mean time per token.

    Raises:
        ConfigError: one half of the users has no time per token.
    """
    before = _serve(conditions, users, None)
    others_before, ours_before = _tpots(before, users)
    if not others_before or not ours_before:
        raise ConfigError(
            "--slo compares every second user with the others, by tokens after the first; give --users of 2 or more, "
            "at least as many --requests, and longer --output-tokens"
        )
    slo_ms = share * fmean(others_before + ours_before)
    after = _serve(conditions, users, slo_ms)
    others, ours = _tpots(after, users)
    met_before, met = (fmean(ms <= slo_ms for ms in times) for times in (ours_before, ours))
    speed = after.loaded_tok_s / before.loaded_tok_s
    return SloPoint(users, slo_ms, met, met_before, speed, fmean(others), fmean(others_before))


def _serve(conditions: Conditions, users: int, tpot_ms: float | None) -> Outcome:
    count = conditions.num_requests or SLO_REQUESTS_PER_USER * users
    workload = replace(conditions.workload(users), num_requests=count)
    server = conditions.server("auto")
    server.serve(replace(workload, num_requests=-(-count // 3)))
    server.blocks = OwnBlocks(conditions.blocks)
    return server.serve(replace(workload, tpot_ms=tpot_ms))


def _tpots(outcome: Outcome, users: int) -> tuple[list[float], list[float]]:
    """Return the times per token of the users without an SLO, and of those with one."""
    times: tuple[list[float], list[float]] = [], []
    for request in outcome.requests:
        if request.user < users and (ms := request.tpot_ms) is not None:
            times[request.user % 2].append(ms)
    return times
