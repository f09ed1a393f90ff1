"""Simulates ``auto`` on step times that follow from other engines' published tables: where would it have been?

    python benchmarks/published_tables.py --output benchmarks/results/published.json

A table gives the throughput of some numbers of users without speculation, with fixed blocks, and with the engine's own
adaptive verification. ``R`` requests that commit ``a`` tokens per step at a throughput of ``X`` take ``R a / X`` per
step, prefills included. Of a step with ``N`` tokens it is assumed that it takes ``f(N) + c R + draft``, where a plain
step has no draft.

What is not published, and so assumed: the accept length of vllm#52362 (:data:`V4_FLASH` says from where), acceptance by
position (the same for all, but for GLM-5.2, of which it is known), how much a confidence head knows (two bounds: each
draft's own acceptance, or the mean alone), and plain steps of SGLang's tables (their line, gone on to one token per
request; they have no column to compare with). Hence speeds of ours mean something beside each other only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import click
import numpy as np

from sglang_dspark.files import atomic_write_text
from sglang_dspark.scheduling.sps_table import SpsTable
from sglang_dspark.tools import provenance
from sglang_dspark.tools.simulator.blocks import ConditionalAcceptance
from sglang_dspark.tools.simulator.costs import Costs, Prefill
from sglang_dspark.tools.simulator.sweep import Conditions, simulate_point
from sglang_dspark.tools.simulator.workload import Lengths

ANSWER = 256
HEADS = {"each draft": 4.0, "the mean alone": float("inf")}
"""How much the confidence head knows -> concentration of acceptances around their mean."""


@dataclass(frozen=True)
class Published:
    """Throughput in tokens per second by number of users.

    Attributes:
        source: where it stands, and of what.
        gamma: drafts of a block, all of which ``fixed`` verifies.
        accept_length: of ``fixed``, by number of users.
        plain: without speculation; empty if it was not measured.
        adaptive: the engine's own.
        adaptive_accept_length: of it; empty if not published.
    """

    source: str
    gamma: int
    accept_length: Mapping[int, float]
    fixed: Mapping[int, float]
    adaptive: Mapping[int, float]
    plain: Mapping[int, float] = field(default_factory=dict)
    adaptive_accept_length: Mapping[int, float] = field(default_factory=dict)

    @property
    def users(self) -> list[int]:
        return list(self.fixed)


_LOADS = (4, 8, 16, 32, 64, 128, 256)


def _by_load(*values: float) -> dict[int, float]:
    return dict(zip(_LOADS, values, strict=True))


V4_FLASH = Published(
    "vllm#52362, DeepSeek-V4-Flash, MI350X",
    gamma=7,
    # What vllm-ascend#16573 expects of this pair; token counts that plain and fixed steps share agree with it.
    accept_length=dict.fromkeys(_LOADS, 3.34),
    plain=_by_load(381.53, 729.20, 1342.83, 2392.99, 4094.75, 6340.78, 8878.57),
    fixed=_by_load(970.33, 1762.59, 2909.52, 4756.32, 6712.35, 8778.87, 7852.42),
    adaptive=_by_load(902.37, 1616.77, 2773.69, 4501.11, 7144.12, 10356.48, 13324.67),
)
QWEN3_8B = Published(
    "sglang#35413, Qwen3-8B, H200",
    gamma=7,
    accept_length={48: 3.76, 64: 3.78},
    fixed={48: 7476, 64: 8511},
    adaptive={48: 8096, 64: 8990},
    adaptive_accept_length={48: 3.61, 64: 3.48},
)
QWEN3_14B = Published(
    "sglang#35413, Qwen3-14B, H200",
    gamma=7,
    accept_length={48: 3.33, 64: 3.32},
    fixed={48: 4644, 64: 4858},
    adaptive={48: 5313, 64: 6026},
    adaptive_accept_length={48: 3.09, 64: 3.01},
)
TABLES = (V4_FLASH, QWEN3_8B, QWEN3_14B)

# vllm#52992, GLM-5.2 on GB200 with 64 users: survival of 16 drafts by position where all are verified. One load and one
# width give no step times, so only the drafts that are needed are worked out.
GLM_SURVIVAL = (
    *(0.7123, 0.5170, 0.3904, 0.3051, 0.2437, 0.2000, 0.1685, 0.1441),
    *(0.1246, 0.1094, 0.0964, 0.0856, 0.0758, 0.0667, 0.0582, 0.0498),
)
GLM_ADAPTIVE_ACCEPT_LENGTH = 3.76


def step_times(published: Published) -> SpsTable:
    """Work out how long steps take, in milliseconds."""
    gamma, users = published.gamma, np.array(published.users, dtype=float)
    lengths = np.array([published.accept_length[count] for count in published.users])
    fixed = 1e3 * users * lengths / np.array(list(published.fixed.values()))
    width = 1 + gamma
    if published.plain:
        plain = 1e3 * users / np.array(list(published.plain.values()))
        per_request, draft = _apart(users, plain, fixed, width)
        tokens = np.concatenate([users, width * users])
        times = np.concatenate([plain - per_request * users, fixed - per_request * users - draft])
        counts = np.unique(tokens)
        means = np.array([times[tokens == count].mean() for count in counts])
    else:
        per_request = draft = 0.0
        slope, start = np.polyfit(width * users, fixed, 1)
        counts = np.array([0.0, width * users.max()])
        means = start + slope * counts
    requests = [1, *published.users]
    grid = np.array(requests, dtype=float)[:, None]
    verify = np.interp(grid * (1 + np.arange(width)), counts, means) + per_request * grid
    drafting = np.tile(np.where(np.arange(width) > 0, draft, 0.0), (len(requests), 1))
    key = {"target": published.source, "device": "published throughput"}
    return SpsTable(key, requests, range(width), [1], drafting[:, :, None], verify[:, :, None])


def _apart(users: np.ndarray, plain: np.ndarray, fixed: np.ndarray, width: int) -> tuple[float, float]:
    """Tell what a step takes per request and for drafting from what its tokens take.

    Plain steps of ``width * R`` requests have as many tokens as fixed steps of ``R``: what they take beyond is ``c``
    for each further request, less the draft.
    """
    few, many = np.nonzero(width * users[:, None] == users)
    rows = np.stack([users[many] - users[few], -np.ones(len(few))], axis=1)
    (per_request, draft), *_ = np.linalg.lstsq(rows, plain[many] - fixed[few], rcond=None)
    return max(0.0, float(per_request)), max(0.0, float(draft))


def even_acceptance(accept_length: float, gamma: int) -> tuple[float, ...]:
    """Return [gamma] equal conditional acceptances that give this accept length, bonus token included."""
    rates = np.linspace(0, 1, 100_001)
    lengths = np.cumsum(rates[:, None] ** np.arange(gamma + 1), axis=1)[:, -1]
    return (float(rates[np.searchsorted(lengths, accept_length)]),) * gamma


@dataclass(frozen=True)
class Row:
    """One load of a table. Throughputs are tokens per second.

    Attributes:
        head: how much the confidence head of the simulation knows, see :data:`HEADS`.
        published_plain, published_fixed, published_adaptive: as published; None if not.
        plain, fixed, auto: simulated.
        verified: drafts that ``auto`` verifies per request and step.
        accept_length: of ``auto``.
    """

    source: str
    users: int
    head: str
    published_plain: float | None
    published_fixed: float
    published_adaptive: float
    plain: float
    fixed: float
    auto: float
    verified: float
    accept_length: float


def rows(published: Published, answer: int = ANSWER, heads: Sequence[str] = tuple(HEADS)) -> Iterator[Row]:
    """Simulate every load of a table, with answers of so many tokens."""
    costs = Costs(step_times(published), Prefill(0.0, 0.0))
    for users in published.users:
        acceptance = even_acceptance(published.accept_length[users], published.gamma)
        for head in heads:
            blocks = ConditionalAcceptance(acceptance, HEADS[head])
            conditions = Conditions(costs, blocks, Lengths(1, 1), Lengths(answer, answer), num_requests=4 * users)
            policies = ("off", f"static:{published.gamma}", "auto")
            plain, fixed, auto = (simulate_point(conditions, policy, users).figures for policy in policies)
            yield Row(
                published.source,
                users,
                head,
                published.plain.get(users),
                published.fixed[users],
                published.adaptive[users],
                plain.output_tok_s,
                fixed.output_tok_s,
                auto.output_tok_s,
                auto.verify_len,
                auto.accept_length,
            )


def drafts_needed(survival: Sequence[float], accept_length: float, concentration: float, draws: int = 20_000) -> float:
    """Return how many drafts per request have to be verified for an accept length, if the likeliest are.

    Args:
        survival: by position.
        concentration: of :class:`ConditionalAcceptance`.
    """
    conditional = np.array(survival) / np.concatenate([[1.0], survival[:-1]])
    blocks = ConditionalAcceptance(tuple(conditional), concentration)
    logits, _ = blocks.draw(range(draws), np.random.default_rng(0))
    assert logits is not None
    likely = np.sort((1 / (1 + np.exp(-logits))).cumprod(1).ravel())[::-1]
    return float(np.searchsorted(likely.cumsum(), (accept_length - 1) * draws) / draws)


@click.command(help=__doc__)
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), required=True)
def main(output: Path) -> None:
    """Simulate all tables and write the result."""
    found = [asdict(row) for table in TABLES for row in rows(table)]
    needed = {head: drafts_needed(GLM_SURVIVAL, GLM_ADAPTIVE_ACCEPT_LENGTH, width) for head, width in HEADS.items()}
    content = {**provenance.record(), "answer_tokens": ANSWER, "rows": found, "glm_drafts_needed": needed}
    atomic_write_text(output, json.dumps(content, indent=1) + "\n")
    for row in found:
        click.echo({name: round(value, 2) if isinstance(value, float) else value for name, value in row.items()})


if __name__ == "__main__":
    main()
