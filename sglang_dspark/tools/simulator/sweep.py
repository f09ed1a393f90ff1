"""Policies side by side in simulated time, over the number of users."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from sglang_dspark.config import POLICY_NAMES, DSparkConfig
from sglang_dspark.errors import ConfigError
from sglang_dspark.tools.simulator.blocks import BlockSource, OwnBlocks
from sglang_dspark.tools.simulator.costs import Costs
from sglang_dspark.tools.simulator.outcome import Figures, Lanes
from sglang_dspark.tools.simulator.server import SimulatedServer
from sglang_dspark.tools.simulator.workload import Lengths, Workload

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
    known = {"static": "verify_len", "threshold": "confidence_threshold"}
    if name not in POLICY_NAMES or (argument and name not in known):
        raise ConfigError(
            f"--policies: {text!r} is no policy; give some of auto, early-stop, off, static:N and "
            "threshold:P, with commas between them"
        )
    fields_ = {"policy": name}
    if not argument:
        return DSparkConfig().with_policy(fields_)
    try:
        value = int(argument) if name == "static" else float(argument)
    except ValueError as error:
        raise ConfigError(f"--policies: {argument!r} in {text!r} is no number") from error
    return DSparkConfig().with_policy({**fields_, known[name]: value})


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
    """Find the number of users from which on each policy is slower for one of them than the first policy."""
    speeds: dict[str, dict[int, float]] = {}
    for point in points:
        speeds.setdefault(point.policy, {})[point.users] = point.figures.user_tok_s
    plain = speeds[points[0].policy]
    found = {}
    for policy, ours in speeds.items():
        ratios = [speed / plain[users] for users, speed in ours.items()]
        found[policy] = None if ratios[-1] > 1 - _CHANCE else crossing(list(plain), ratios) or float(points[0].users)
    return found


def crossing(users: Sequence[int], ratios: Sequence[float]) -> float | None:
    """Return where ratios of speeds fall below 1 for good, interpolated on logarithmic axes.

    Returns:
        A number of users; None if the ratios stay on one side of 1, or are 1 or more at the end.
    """
    logs = np.log(ratios)
    ahead = np.flatnonzero(logs >= 0)
    if not len(ahead) or ahead[-1] + 1 == len(logs):
        return None
    last = ahead[-1]
    share = logs[last] / (logs[last] - logs[last + 1])
    return float(users[last] * (users[last + 1] / users[last]) ** share)
