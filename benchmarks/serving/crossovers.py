"""Find where plain serving overtakes speculation as users are added."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from serving.configurations import OFF, PLAIN
from sglang_dspark.tools.simulator.sweep import crossing


@dataclass(frozen=True)
class Crossover:
    """The load at which a configuration stops being faster than its baseline.

    Attributes:
        users: interpolated on a logarithmic axis of users; None when the ratio stays on one side of 1.
        ratio_at_most: at the most users that were measured.
    """

    config: str
    users: float | None
    ratio_at_most: float


def user_ratios(frame: pd.DataFrame, baselines: dict[str, str], metric: str = "output_tok_s") -> pd.DataFrame:
    """Return the ratios to the baseline in the closed loop, paired by round.

    Returns:
        One row per configuration other than its baseline and number of users, in ascending order of users: columns
        ``config, policy, against, concurrency, ratio`` (geometric mean), ``low, high`` (smallest and largest round);
        ``against`` is the policy of the baseline.
    """
    closed = frame[frame["concurrency"].notna()]
    table = closed.pivot_table(index=["concurrency", "round"], columns="config", values=metric, sort=True)
    policies = closed.drop_duplicates("config").set_index("config")["policy"]
    records = []
    for config, baseline in baselines.items():
        if config == baseline or config not in table or baseline not in table:
            continue
        logs = np.log(table[config] / table[baseline]).dropna().groupby("concurrency")
        for users, values in logs:
            low, middle, high = np.exp([values.min(), values.mean(), values.max()])
            records.append((config, policies[config], policies[baseline], int(users), middle, low, high))
    return pd.DataFrame(records, columns=["config", "policy", "against", "concurrency", "ratio", "low", "high"])


def crossovers(ratios: pd.DataFrame) -> list[Crossover]:
    """Return where each configuration falls behind its baseline for good; ``off`` drafts nothing and is left out.

    Args:
        ratios: of :func:`user_ratios`.
    """
    found = []
    for config, points in ratios[ratios["policy"] != OFF].groupby("config", sort=False):
        ratio = points["ratio"].tolist()
        found.append(Crossover(str(config), crossing(points["concurrency"].tolist(), ratio), ratio[-1]))
    return found


def shown_baselines(ratios: pd.DataFrame) -> list[str]:
    """Return the policies of the baselines that a reader knows, those of :func:`user_ratios`, in the order of parts.

    What the plugin gains without drafts comes first, then what speculation adds.
    """
    return [policy for policy in (PLAIN, OFF) if (ratios["against"] == policy).any()]
