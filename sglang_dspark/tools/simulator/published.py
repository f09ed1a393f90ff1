"""Compare the DSpark paper's figures with those of this code.

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
FIGURE_2: Mapping[str, tuple[float, ...]] = {
    "math": (0.905, 0.890, 0.888, 0.885, 0.887, 0.891, 0.882),
    "code": (0.886, 0.872, 0.860, 0.861, 0.858, 0.859, 0.851),
    "chat": (0.735, 0.738, 0.740, 0.744, 0.758, 0.766, 0.761),
}
# Table 1: accept lengths of the same drafter, set by set.
TABLE_1: Mapping[str, tuple[float, ...]] = {
    "math": (6.11, 5.70, 4.89),
    "code": (5.13, 5.38, 4.86),
    "chat": (3.64, 3.54, 3.29),
}
# Fig. 5: tokens committed and verified per step by threshold 0, 0.5, 0.6 ... 0.9; GSM8K, HumanEval and MT-Bench.
FIGURE_5: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "math": ((6.11, 6.13, 6.01, 5.74, 5.48, 4.56), (7.95, 7.77, 7.51, 6.99, 6.34, 4.93)),
    "code": ((5.38, 5.36, 5.24, 5.06, 4.70, 3.73), (7.96, 7.44, 7.00, 6.44, 5.58, 4.05)),
    "chat": ((3.64, 3.27, 3.05, 2.74, 2.33, 1.99), (7.97, 4.92, 4.07, 3.32, 2.60, 2.09)),
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
_BLOCKS = 20_000


@dataclass(frozen=True)
class Comparison:
    """A published number beside ours.

    Attributes:
        figure: of the paper.
        case: what it is the number of.
    """

    figure: str
    case: str
    published: float
    ours: float


def accept_lengths() -> list[Comparison]:
    """Compare Table 1's means with one plus the survivals that the conditional acceptances of Fig. 2 imply."""
    compared = []
    for domain, conditional in FIGURE_2.items():
        published, ours = float(np.mean(TABLE_1[domain])), float(1 + np.cumprod(conditional).sum())
        compared.append(Comparison("Table 1", f"accept length, {domain}", published, ours))
    return compared


def thresholds() -> list[Comparison]:
    """Compare Fig. 5 with blocks drawn by Fig. 2, where thresholds on the confidence verify as many tokens.

    Tokens committed are shares of those that whole blocks commit, since Fig. 5 shows one set of a domain, and Fig. 2
    the mean of its sets.
    """
    compared = []
    for domain, (committed, verified) in FIGURE_5.items():
        source = ConditionalAcceptance(FIGURE_2[domain])
        logits, accepted = source.draw(range(_BLOCKS), np.random.default_rng(0))
        assert logits is not None
        confidence = 1 / (1 + np.exp(-logits))
        lens = [(confidence >= threshold).cumprod(1).sum(1) for threshold in np.linspace(1, 0, 21)]
        tokens = [float(one.mean()) + 1 for one in lens]
        kept = [float(np.minimum(one, accepted).mean()) + 1 for one in lens]
        for theirs, place in zip(committed[1:], verified[1:], strict=True):
            case = f"share committed with {place:.2f} tokens verified, {domain}"
            ours = float(np.interp(place, tokens, kept)) / kept[-1]
            compared.append(Comparison("Fig. 5", case, theirs / committed[0], ours))
    return compared


def step_times(engine: str) -> SpsTable:
    """Take the step times of an engine from Fig. 8.

    MTP-1 commits a fixed number of tokens per request and step, so its step time goes with requests over throughput.
    The unit is a millisecond but for that number and the number of GPUs, which are not published. The figure's points
    lie on a line, and MTP-1 verifies two tokens per request: a step takes ``a + b * tokens``. What comes from requests
    (attention to their contexts) cannot be told from what comes from tokens. Drafting is free, as in the paper's
    objective.
    """
    requests, throughput = (np.array(axis) for axis in zip(*FIGURE_8_MTP[engine].items(), strict=True))
    slope, start = np.polyfit(2 * requests, requests / throughput, 1)
    counts = geometric_grid(512)
    drafts = np.arange(PRODUCTION_BLOCK + 1.0)
    verify = start + slope * np.array(counts)[:, None] * (1 + drafts)
    return SpsTable(
        key={"target": engine, "draft": f"DSpark-{PRODUCTION_BLOCK}", "device": "the step times of Fig. 8"},
        requests=counts,
        drafts=range(PRODUCTION_BLOCK + 1),
        contexts=[1],
        draft_ms=np.zeros((*verify.shape, 1)),
        verify_ms=verify[:, :, None],
    )


def acceptance() -> ConditionalAcceptance:
    """Stand in for the acceptance of the production drafters, which is not published: Fig. 2's chat."""
    return ConditionalAcceptance(FIGURE_2["chat"][:PRODUCTION_BLOCK], name="the paper's acceptance on chat")


def budgets(engines: Sequence[str] = tuple(FIGURE_8_BUDGET)) -> list[Comparison]:
    """Compare Fig. 8's verify budgets with those of the policy ``auto`` on the step times of the same figure."""
    compared = []
    for engine in engines:
        costs = Costs(step_times(engine), Prefill(0.0, 0.0))
        conditions = Conditions(costs, acceptance(), Lengths(1, 1), Lengths(120, 240))
        for requests, published in FIGURE_8_BUDGET[engine].items():
            figures = simulate_point(replace(conditions, num_requests=2 * requests), "auto", requests).figures
            case = f"tokens verified per request, {engine} with {requests} requests"
            compared.append(Comparison("Fig. 8", case, published, figures.verify_len + 1))
    return compared
