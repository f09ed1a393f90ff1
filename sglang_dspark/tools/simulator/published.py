"""What the DSpark paper publishes, beside what this code makes of it.

Numbers of figures were read off their vector paths; they are good to about the last digit given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sglang_dspark.scheduling.sps_table import SpsTable, geometric_grid
from sglang_dspark.tools.simulator.blocks import ConditionalAcceptance
from sglang_dspark.tools.simulator.costs import Costs, Prefill
from sglang_dspark.tools.simulator.sweep import Conditions, simulate_point
from sglang_dspark.tools.simulator.workload import Lengths

# Fig. 2: conditional acceptance by position, Qwen3-4B, block size 7, temperature 1, means over the sets of a domain.
FIGURE_2: Mapping[tuple[str, str], tuple[float, ...]] = {
    ("DSpark", "math"): (0.905, 0.890, 0.888, 0.885, 0.887, 0.891, 0.882),
    ("DSpark", "code"): (0.886, 0.872, 0.860, 0.861, 0.858, 0.859, 0.851),
    ("DSpark", "chat"): (0.735, 0.738, 0.740, 0.744, 0.758, 0.766, 0.761),
    ("DFlash", "math"): (0.885, 0.827, 0.820, 0.834, 0.841, 0.839, 0.828),
    ("DFlash", "code"): (0.865, 0.815, 0.797, 0.801, 0.810, 0.801, 0.777),
    ("DFlash", "chat"): (0.718, 0.648, 0.638, 0.661, 0.682, 0.692, 0.688),
    ("Eagle3", "math"): (0.811, 0.823, 0.838, 0.844, 0.851, 0.856, 0.850),
    ("Eagle3", "code"): (0.771, 0.774, 0.781, 0.791, 0.787, 0.794, 0.784),
    ("Eagle3", "chat"): (0.534, 0.589, 0.642, 0.678, 0.709, 0.729, 0.733),
}
# Table 1: accept lengths of the same drafters, set by set.
TABLE_1: Mapping[tuple[str, str], tuple[float, ...]] = {
    ("DSpark", "math"): (6.11, 5.70, 4.89),
    ("DSpark", "code"): (5.13, 5.38, 4.86),
    ("DSpark", "chat"): (3.64, 3.54, 3.29),
    ("DFlash", "math"): (5.40, 4.85, 4.15),
    ("DFlash", "code"): (4.40, 4.74, 4.18),
    ("DFlash", "chat"): (3.07, 2.96, 2.83),
    ("Eagle3", "math"): (5.14, 4.62, 3.92),
    ("Eagle3", "code"): (3.69, 4.16, 3.77),
    ("Eagle3", "chat"): (2.39, 2.26, 2.55),
}
# Fig. 5: tokens committed and verified per step by threshold 0, 0.1 ... 0.9; GSM8K, HumanEval and MT-Bench.
FIGURE_5: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "math": (
        (6.11, 6.11, 6.11, 6.12, 6.13, 6.13, 6.01, 5.74, 5.48, 4.56),
        (7.95, 7.95, 7.95, 7.92, 7.87, 7.77, 7.51, 6.99, 6.34, 4.93),
    ),
    "code": (
        (5.38, 5.38, 5.39, 5.40, 5.36, 5.36, 5.24, 5.06, 4.70, 3.73),
        (7.96, 7.96, 7.94, 7.88, 7.69, 7.44, 7.00, 6.44, 5.58, 4.05),
    ),
    "chat": (
        (3.64, 3.62, 3.64, 3.56, 3.47, 3.27, 3.05, 2.74, 2.33, 1.99),
        (7.97, 7.95, 7.69, 6.92, 5.93, 4.92, 4.07, 3.32, 2.60, 2.09),
    ),
}
# Fig. 8, DeepSeek-V4-Flash and -Pro: requests -> mean tokens verified per request with DSpark-5, anchor included.
FIGURE_8_BUDGET: Mapping[str, Mapping[int, float]] = {
    "V4-Flash": {20: 4.94, 60: 4.49, 100: 4.12, 140: 3.81, 200: 3.48},
    "V4-Pro": {5: 5.39, 50: 4.64, 95: 4.07, 140: 3.70, 185: 3.52},
}
# Fig. 8: requests -> thousands of tokens per second and GPU with MTP-1, which verifies one draft per request.
FIGURE_8_MTP: Mapping[str, Mapping[int, float]] = {
    "V4-Flash": {50: 5.1, 100: 8.8, 150: 11.6, 200: 13.8},
    "V4-Pro": {50: 2.4, 100: 3.8, 150: 4.7, 200: 5.6},
}
PRODUCTION_BLOCK = 5
_THRESHOLDS = tuple(step / 10 for step in range(10))
_BLOCKS = 20_000


@dataclass(frozen=True)
class AcceptLength:
    """Fig. 2 multiplied out, beside the mean of Table 1."""

    drafter: str
    domain: str
    published: float
    computed: float


def accept_lengths() -> list[AcceptLength]:
    """One plus the survivals that the conditional acceptances of Fig. 2 imply, for each drafter and domain."""
    return [
        AcceptLength(*key, float(np.mean(TABLE_1[key])), float(1 + np.cumprod(conditional).sum()))
        for key, conditional in FIGURE_2.items()
    ]


@dataclass(frozen=True)
class ThresholdPoint:
    """Tokens per step at a threshold on the confidence, bonus token and anchor included."""

    domain: str
    threshold: float
    published_committed: float
    published_verified: float
    committed: float
    verified: float


def threshold_sweep(concentration: float = ConditionalAcceptance.concentration, seed: int = 0) -> list[ThresholdPoint]:
    """Fig. 5 with blocks drawn by Fig. 2, whose head is right about every draft.

    Args:
        concentration: how far drafts differ from each other; the paper does not say.
    """
    points = []
    for domain, (committed, verified) in FIGURE_5.items():
        source = ConditionalAcceptance(FIGURE_2["DSpark", domain], concentration)
        logits, accepted = source.draw(range(_BLOCKS), np.random.default_rng(seed))
        assert logits is not None
        confidence = 1 / (1 + np.exp(-logits))
        for place, threshold in enumerate(_THRESHOLDS):
            lens = (confidence >= threshold).cumprod(1).sum(1)
            ours = float(np.minimum(lens, accepted).mean() + 1), float(lens.mean() + 1)
            points.append(ThresholdPoint(domain, threshold, committed[place], verified[place], *ours))
    return points


@dataclass(frozen=True)
class BudgetPoint:
    """Mean tokens verified per request and step, anchor included."""

    engine: str
    requests: int
    published: float
    simulated: float


def production_table(engine: str) -> SpsTable:
    """Step times of an engine in arbitrary units, as far as Fig. 8 gives them away.

    MTP-1 commits a fixed number of tokens per request and step, so its step time goes with requests over throughput.
    The figure's points lie on a line, and it verifies two tokens per request: a step takes ``a + b * tokens``. What
    comes from requests (attention to their contexts) cannot be told from what comes from tokens. Drafting is free,
    as in the paper's objective.
    """
    requests, throughput = (np.array(axis) for axis in zip(*FIGURE_8_MTP[engine].items(), strict=True))
    slope, start = np.polyfit(2 * requests, requests / throughput, 1)
    counts = geometric_grid(256)
    drafts = np.arange(PRODUCTION_BLOCK + 1.0)
    verify = start + slope * np.array(counts)[:, None] * (1 + drafts)
    return SpsTable(
        key={"device": engine},
        requests=counts,
        drafts=range(PRODUCTION_BLOCK + 1),
        contexts=[1],
        draft_ms=np.zeros((*verify.shape, 1)),
        verify_ms=verify[:, :, None],
    )


def budgets(domain: str = "chat", engines: Sequence[str] = tuple(FIGURE_8_BUDGET)) -> list[BudgetPoint]:
    """Fig. 8's verify budgets: the policy ``auto`` on these step times, with the acceptance of a domain of Fig. 2.

    The acceptance of the production drafters on their traffic is not published.
    """
    points = []
    for engine in engines:
        blocks = ConditionalAcceptance(FIGURE_2["DSpark", domain][:PRODUCTION_BLOCK])
        conditions = Conditions(
            Costs(production_table(engine), Prefill(0.0, 0.0)), blocks, Lengths(1, 1), Lengths(120, 240)
        )
        for requests, published in FIGURE_8_BUDGET[engine].items():
            some = replace(conditions, num_requests=2 * requests)
            figures = simulate_point(some, "auto", users=requests)[0].figures
            points.append(BudgetPoint(engine, requests, published, figures.verify_len + 1))
    return points
