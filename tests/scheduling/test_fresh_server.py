"""The first 200 tokens of a lone chat on a fresh server, in simulated time against ``off``."""

from collections import deque
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from step_tables import GAMMA, compute_bound

from sglang_dspark.config import DSparkConfig
from sglang_dspark.tools.simulator.blocks import ConditionalAcceptance
from sglang_dspark.tools.simulator.costs import Costs, Prefill
from sglang_dspark.tools.simulator.server import SimulatedServer
from sglang_dspark.tools.simulator.workload import Request

pytestmark = pytest.mark.slow

TOKENS, CONTEXT, SEEDS = 200, 60, range(8)
USELESS, MIDDLING, GOOD = 0.05, 0.5, 0.85
# What is off in the table: nothing, all steps, those with drafts, or those with so many.
RIGHT, ALL, DRAFTED = "nothing", "all", "drafted"


class Chat:
    """Blocks of a drafter, and what the last one is expected to bring.

    Args:
        bias: added to the confidences; None: no confidence head.
    """

    gamma, name = GAMMA, "a lone chat"

    def __init__(self, rate, bias):
        self._blocks, self._bias = ConditionalAcceptance((rate,) * GAMMA), bias
        self.gains = np.zeros(GAMMA + 1)

    def draw(self, requests, rng):
        logits, accepted = self._blocks.draw(requests, rng)
        self.gains = np.concatenate([[0.0], (1 / (1 + np.exp(-logits[0]))).cumprod().cumsum()])
        return None if self._bias is None else logits + self._bias, accepted


def measured_in_noise(table, what, factor):
    off = np.array([what in (ALL, drafts) or (what == DRAFTED and drafts > 0) for drafts in range(GAMMA + 1)])
    factors = np.where(off, factor, 1.0)[:, None]
    drafting = factor if what in (ALL, DRAFTED) else 1.0
    return replace(table, verify_ms=table.verify_ms * factors, draft_ms=table.draft_ms * drafting)


def to_off(chat, believed, seed):
    """Return how many times as fast as ``off`` the chat gets its tokens."""
    truth = compute_bound(requests=(1,))
    costs = Costs(truth, Prefill(0.0, 0.0), 0.03, believed(truth))
    server, request = SimulatedServer(costs, chat, DSparkConfig(), seed=seed), Request(0, CONTEXT, 1 << 30)
    tokens = ms = 0.0
    behind = deque()
    while tokens < TOKENS:
        step_ms, result = server.decode([request])
        tokens += 1 + chat.gains[int(result.record.verify_lens[0])]
        ms += step_ms
        behind.append(result)
        if len(behind) > 1:  # its outcome is known when the next step has run
            known = behind.popleft()
            server.schedule.observe(known.record, [0], known.accepted.tolist())
    return tokens * truth.step_ms(1, 1, 0, CONTEXT) / ms


def all_to_off(rate, bias):
    """Return [noise, seed] how many times as fast as ``off`` chats get their tokens."""
    chats = [
        [to_off(Chat(rate, bias), partial(measured_in_noise, what=what, factor=factor), seed) for seed in SEEDS]
        for what, factor in NOISE
    ]
    return np.array(chats)


NOISE = [
    *((RIGHT, 1.0), (ALL, 0.5), (ALL, 3.0), (DRAFTED, 3.0), (0, 3.0), (1, 0.5)),
    *((3, 0.5), (3, 3.0), (GAMMA, 0.5), (GAMMA, 3.0)),
]


@pytest.mark.parametrize("bias", [0.0, 2.5, None], ids=["calibrated", "overconfident", "no head"])
def test_a_useless_drafter_costs_little(bias):
    ratios = all_to_off(USELESS, bias)
    assert ratios.min() > 0.935, ratios
    assert ratios.mean(1).min() > 0.955, ratios


@pytest.mark.parametrize("bias", [0.0, None], ids=["calibrated", "no head"])
@pytest.mark.parametrize(("rate", "least"), [(MIDDLING, 1.05), (GOOD, 2.0)])
def test_a_table_measured_in_noise_is_mended_within_the_first_answer(rate, least, bias):
    ratios = all_to_off(rate, bias)
    assert ratios.mean(1).min() > least, ratios
