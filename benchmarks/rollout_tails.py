r"""Ask in simulated time whether rollouts end sooner if requests that will be last get more of the drafts.

    python benchmarks/rollout_tails.py --output benchmarks/results/rollout_tails.json

A batch of rollouts begins at once, with lognormal lengths, and the time is that of its last token. Under ``auto`` all
drafts count alike. Each rule weighs a request's drafts, as the key ``weight`` does: by its time per token so far, by
its tokens so far (of lognormal lengths, one that is long already is likely to have most to come), or, as no server can,
by the tokens or the time that it still needs. All rules of a seed have the same lengths, blocks and noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np
from formula_tables import compute_bound, h200
from simulated import GAMMA, NOISE, Recorded

from sglang_dspark.config import DSparkConfig
from sglang_dspark.scheduling.promises import Pace
from sglang_dspark.tools import provenance
from sglang_dspark.tools.simulator.blocks import OwnBlocks
from sglang_dspark.tools.simulator.costs import Costs, Prefill
from sglang_dspark.tools.simulator.server import SimulatedServer
from sglang_dspark.tools.simulator.workload import Lengths, Request, Workload

MACHINES = {"H200, Qwen3-8B's shape": h200, "every token costs": compute_bound}
SPREAD = 1.0
"""Standard deviation of the logarithm of a length."""

Rule = Callable[[float, int, int], float]
RULES: dict[str, Rule] = {
    "auto": lambda ms, tokens, left: 1.0,
    "time per token": lambda ms, tokens, left: ms / tokens,
    "tokens so far": lambda ms, tokens, left: float(tokens),
    "tokens left": lambda ms, tokens, left: float(left),
    "time left": lambda ms, tokens, left: left * ms / tokens,
    "time left, cubed": lambda ms, tokens, left: (left * ms / tokens) ** 3,
}
"""By milliseconds since the first token, tokens so far and tokens to come, what a request's drafts count."""


@dataclass
class Weighed(Pace):
    """An answer whose drafts count by a rule."""

    rule: Rule = RULES["auto"]
    length: int = 0

    def counts(self, now_ms: float, tokens: int) -> float:
        self.begin(now_ms, tokens)
        since_ms = now_ms - (now_ms if self.began_ms is None else self.began_ms)
        return self.rule(since_ms + 1.0, max(tokens, 1), max(self.length - tokens, 1))


@dataclass(frozen=True)
class Rollouts(Workload):
    """A batch of rollouts that begin at once."""

    rule: Rule = RULES["auto"]
    mean: int = 1
    lengths: list[int] = field(default_factory=list)

    def requests(self, rng: np.random.Generator) -> Iterator[Request]:
        drawn = rng.lognormal(np.log(self.mean) - SPREAD**2 / 2, SPREAD, self.num_requests)
        self.lengths[:] = np.maximum(drawn, 2).astype(int).tolist()
        for index, length in enumerate(self.lengths):
            yield Request(index, self.prompt.draw(rng), length)

    def pace(self, user: int) -> Pace:
        return Weighed(rule=self.rule, length=self.lengths[user])


def ends(machine: str, rule: str, requests: int, mean: int, seed: int) -> list[float]:
    """Return the milliseconds to the end of each rollout, in order."""
    grid = tuple(sorted({*(2**power for power in range(10) if 2**power < requests), requests}))
    costs = Costs(MACHINES[machine](gamma=GAMMA, requests=grid), Prefill(5.0, 0.01), NOISE)
    server = SimulatedServer(costs, Recorded(), DSparkConfig(), seed=seed)
    batch = Rollouts(requests, Lengths.parse("64-256"), Lengths.parse("1"), requests, rule=RULES[rule], mean=mean)
    # What the policy learns first is the same under all rules.
    server.serve(Workload(2 * requests, batch.prompt, Lengths.parse("64"), requests))
    server.blocks = OwnBlocks(Recorded(), seed)
    return sorted(request.done_ms for request in server.serve(batch).requests)


def compare(machine: str, requests: int, mean: int, seeds: int) -> list[dict[str, Any]]:
    """Return of each rule how its last and its mean end lie beside those of ``auto``, by seed."""
    found = {rule: [ends(machine, rule, requests, mean, seed) for seed in range(seeds)] for rule in RULES}
    rows = []
    for rule, runs in found.items():
        last = [run[-1] / base[-1] - 1 for run, base in zip(runs, found["auto"], strict=True)]
        middle = [np.mean(run) / np.mean(base) - 1 for run, base in zip(runs, found["auto"], strict=True)]
        few = [run[-requests // 8] / run[-1] for run in runs]
        rows.append(
            {
                "machine": machine,
                "requests": requests,
                "rule": rule,
                "last_end": round(float(np.mean(last)), 4),
                "last_end_error": round(float(np.std(last, ddof=1) / np.sqrt(seeds)), 4),
                "mean_end": round(float(np.mean(middle)), 4),
                "share_of_time_with_an_eighth_left": round(1 - float(np.mean(few)), 3),
            }
        )
    return rows


@click.command()
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), required=True)
@click.option("--requests", "loads", default="64", help="Rollouts of a batch.")
@click.option("--mean", default=512, help="Mean tokens of a rollout.")
@click.option("--seeds", default=8)
def main(output: Path, loads: str, mean: int, seeds: int) -> None:
    """Write how much sooner batches of rollouts end."""
    rows = [row for load in map(int, loads.split(",")) for name in MACHINES for row in compare(name, load, mean, seeds)]
    provenance.write_json(output, {**provenance.record(), "mean_tokens": mean, "seeds": seeds, "rows": rows})


if __name__ == "__main__":
    main()
