"""Points of a measured sweep (benchmarks/sweep_concurrency.py), as the simulator compares itself with them."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from sglang_dspark.config import POLICY_NAMES
from sglang_dspark.errors import ConfigError
from sglang_dspark.scheduling.sps_table import SpsTable
from sglang_dspark.tools.simulator.blocks import ConditionalAcceptance

_NUMBERS = (
    "concurrency",
    "round",
    "output_tok_s",
    "ttft_ms",
    "tpot_ms",
    "itl_p50_ms",
    "itl_p99_ms",
    "num_requests",
    "num_tokens",
    "num_prompt_tokens",
)
_COUNTS = ("accepted", "verified", "decode_rounds", "steps")
_PLAIN = "plain"

Row = dict[str, Any]


@dataclass(frozen=True)
class Measured:
    """All rounds of one configuration at one concurrency; medians over the rounds, counts of all of them together.

    Attributes:
        label: of the configuration.
        policy: as the simulator names it; ``plain`` for the server without the plugin.
        rates: tokens per second of all users by round.
        step_ms: median time between two pieces of a stream: a decode step, or for ``plain`` that of one token.
        accepted_per_round: the accept length beyond the one token that is for sure; NaN for ``plain``.
        verify_len: drafts verified per request and step; NaN for ``plain``.
        gap_p99_ms: 99th percentile of the time between two pieces of a stream.
        tpot_ms: time per token after the first, whatever came between two steps.
        running: requests in a step on average; NaN for ``plain``.
    """

    label: str
    policy: str
    users: int
    rates: Mapping[int, float]
    ttft_ms: float
    step_ms: float
    num_requests: int
    prompt_tokens: int
    output_tokens: int
    accepted_per_round: float
    verify_len: float
    gap_p99_ms: float
    tpot_ms: float
    running: float

    @property
    def tok_s(self) -> float:
        """Tokens per second of all users in the median round."""
        return median(self.rates.values())

    @property
    def slowest(self) -> float:
        """The least of a round."""
        return min(self.rates.values())

    @property
    def fastest(self) -> float:
        """The most of a round."""
        return max(self.rates.values())

    @property
    def accept_length(self) -> float:
        """Tokens committed per request and step, bonus included; NaN for ``plain``."""
        return 1 + self.accepted_per_round

    @property
    def decides(self) -> bool:
        """Whether the policy chooses lengths by itself."""
        return self.fixed_len is None and self.policy not in ("plain", "static")

    @property
    def fixed_len(self) -> int | None:
        """Drafts that every request verifies in every step, where the configuration fixes that; 0 for ``off``."""
        policy, _, drafts = self.policy.partition(":")
        if policy == "off":
            return 0
        return int(drafts) if policy == "static" and drafts else None


def read_sweep(path: Path, dtype: str | None = None) -> list[Measured]:
    """The points of a ``sweep.csv``, by concurrency; of open loops and of servers that are not SGLang's there are none.

    Args:
        dtype: that of the step times: rows of servers in another one are left out. None takes all.

    Raises:
        ConfigError: it is none, or has no such rows.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = [_numbers(row) for row in csv.DictReader(file) if _is_simulated(row)]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"--check {path}: {error!r}; give a sweep.csv of benchmarks/sweep_concurrency.py") from error
    rows = [row for row in rows if dtype in (None, row["dtype"])]
    if not rows:
        raise ConfigError(
            f"--check {path} has no rows of {dtype or 'any'} servers; give a sweep.csv of "
            "benchmarks/sweep_concurrency.py and a table of the same dtype"
        )

    def place(row: Row) -> tuple[int, str]:
        return int(row["concurrency"]), row["label"]

    rows.sort(key=place)
    return [_measured(label, users, list(group)) for (users, label), group in groupby(rows, key=place)]


def _is_simulated(row: Row) -> bool:
    """Whether the row is of a closed loop on a server that can be simulated."""
    return row["concurrency"] != "" and row["policy"] in (_PLAIN, *POLICY_NAMES)


def _numbers(row: Row) -> Row:
    numbers = {name: float(row[name]) for name in _NUMBERS}
    counts = {name: float(row[name] or "nan") for name in _COUNTS}
    policy = row["policy"]
    if policy == "static":
        policy = f"static:{int(float(row['verify_len']))}"
    elif policy == "threshold":  # whose argument stands in the label alone
        policy = row["config"].partition("@")[0].rpartition("=")[2]
    label = row["config"].partition("@")[0] if row["config"].count(" ") == 0 else row["config"]
    return {"label": label, "policy": policy, "dtype": row["dtype"], **numbers, **counts}


def _measured(label: str, users: int, rows: Sequence[Row]) -> Measured:
    def total(name: str) -> float:
        return sum(row[name] for row in rows)

    return Measured(
        label=label,
        policy=rows[0]["policy"],
        users=users,
        rates={int(row["round"]): row["output_tok_s"] for row in rows},
        ttft_ms=median(row["ttft_ms"] for row in rows),
        step_ms=median(row["itl_p50_ms"] for row in rows),
        num_requests=round(median(row["num_requests"] for row in rows)),
        prompt_tokens=round(total("num_prompt_tokens") / total("num_requests")),
        output_tokens=round(total("num_tokens") / total("num_requests")),
        accepted_per_round=total("accepted") / total("decode_rounds"),
        verify_len=total("verified") / total("decode_rounds"),
        gap_p99_ms=median(row["itl_p99_ms"] for row in rows),
        tpot_ms=median(row["tpot_ms"] for row in rows),
        running=total("decode_rounds") / total("steps"),
    )


def acceptance(points: Sequence[Measured]) -> dict[int, ConditionalAcceptance]:
    """By users: conditional acceptance, from the accept lengths of ``static:1``, ``static:2`` ... of the same prompts.

    One draft more is worth its survival, so consecutive lengths differ by the survival of the longer one's last draft.

    Raises:
        ConfigError: the sweep has no such configurations.
    """
    found = {}
    for users in sorted({point.users for point in points}):
        lengths = {p.label: p.accepted_per_round for p in points if p.users == users}
        gamma = next((n for n in range(64) if f"static:{n + 1}" not in lengths), 0)
        if gamma == 0:
            raise ConfigError(f"the sweep has no static:1, static:2 ... at {users} users; give --blocks")
        survival = np.diff([0.0, *(lengths[f"static:{n}"] for n in range(1, gamma + 1))])
        # Each length is measured on its own, so a small survival may come out above the one before, or negative.
        survival = np.minimum.accumulate(np.clip(survival, 1e-3, 1.0))
        conditional = survival / np.concatenate([[1.0], survival[:-1]])
        found[users] = ConditionalAcceptance(tuple(conditional.tolist()), name="accept lengths of the sweep")
    return found


def fixed_step_ms(table: SpsTable, point: Measured) -> float:
    """What a table says of the steps of a fixed length."""
    drafts = point.fixed_len
    if drafts is None:
        raise ValueError(f"{point.label} has steps of many lengths")
    context = point.prompt_tokens + point.output_tokens / 2
    return table.step_ms(point.users, point.users * (1 + drafts), drafts, context)


def measured_table(points: Sequence[Measured], table: SpsTable, host: float) -> SpsTable:
    """``table`` with the step times of the sweep's own fixed lengths, where it has them.

    The ratio of measured to tabled time scales the cells of as many requests and drafts; the cells between are scaled
    by the ratio of the nearest number of drafts at the nearest number of users.

    Args:
        host: milliseconds of a step that are not the table's.
    """
    ratios = {
        (point.users, point.fixed_len): max(point.step_ms - host, 0.1) / fixed_step_ms(table, point)
        for point in points
        if point.fixed_len is not None
    }
    if not ratios:
        raise ConfigError("--measured-steps: the sweep has no fixed lengths (static:1, static:2 ...) to take them from")
    verify_ms, draft_ms = table.verify_ms.copy(), table.draft_ms.copy()
    for row, requests in enumerate(table.requests):
        for drafts in table.drafts:
            nearest = min(ratios, key=lambda at: (abs(np.log(at[0] / requests)), abs(at[1] - drafts)))
            verify_ms[row, drafts] *= ratios[nearest]
            draft_ms[row, drafts] *= ratios[nearest]
    return replace(table, verify_ms=verify_ms, draft_ms=draft_ms)


def host_ms(points: Sequence[Measured], table: SpsTable) -> float:
    """Time of a step beyond the table's: the median over the fixed lengths of the fewest users."""
    fewest = min(point.users for point in points)
    extra = [p.step_ms - fixed_step_ms(table, p) for p in points if p.users == fewest and p.fixed_len]
    return max(0.0, median(extra)) if extra else 0.0
