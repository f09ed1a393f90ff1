"""The first 200 tokens of a lone chat on a fresh server, in simulated time against ``off``."""

from collections import deque
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from misled import cpu_table, gpu_table
from step_tables import GAMMA, compute_bound

from sglang_dspark.config import DSparkConfig
from sglang_dspark.tools.simulator.server import Costs, Prefill, SimulatedServer
from sglang_dspark.tools.simulator.workload import ConditionalAcceptance, Request

pytestmark = pytest.mark.slow

TOKENS, CONTEXT, SEEDS = 200, 60, range(5)
MACHINES = {"CPU": cpu_table, "GPU": gpu_table, "costly tokens": partial(compute_bound, requests=(1,))}
HEADS = {"calibrated": 0.0, "overconfident": 2.5, "no head": None}
USELESS, MIDDLING, GOOD = 0.05, 0.5, 0.85
# What is off in the table: nothing, all steps, those with drafts, or those with so many.
RIGHT, ALL, DRAFTED = "nothing", "all", "drafted"


class Chat:
    """Blocks of a drafter.

    Args:
        rates: of acceptance, each for an equal part of the first tokens; the last one holds on.
        bias: added to the confidences; None: no confidence head.
    """

    name = "a lone chat"

    def __init__(self, gamma, rates, bias):
        self.gamma, self.tokens = gamma, 0
        self._parts = [ConditionalAcceptance((rate,) * gamma) for rate in rates]
        self._bias = bias

    def draw(self, requests, rng):
        part = min(self.tokens * len(self._parts) // TOKENS, len(self._parts) - 1)
        logits, accepted = self._parts[part].draw(requests, rng)
        return None if self._bias is None else logits + self._bias, accepted


class FreshServer:
    """A server in simulated time that has served nothing yet."""

    def __init__(self, truth, bias, seed, believed=lambda table: table):
        self._truth, self._bias, self._chats = truth, bias, 0
        costs = Costs(truth, Prefill(0.0, 0.0), 0.03, believed(truth))
        self._server = SimulatedServer(costs, Chat(truth.gamma, [0.0], bias), DSparkConfig(), seed=seed)

    def to_off(self, *rates, first=(TOKENS,)):
        """Return how many times as fast as ``off`` the next chat gets its first tokens, for each number of them."""
        chat = self._server.blocks = Chat(self._truth.gamma, rates, self._bias)
        self._server.interrupt()
        request = Request(self._chats, CONTEXT, 1 << 30)
        self._chats += 1
        tokens, ms, behind = [0], [0.0], deque()
        while tokens[-1] < max(first):
            result = self._server.decode([request])
            chat.tokens = tokens[-1] + 1 + int(result.accepted[0])
            tokens.append(chat.tokens)
            ms.append(ms[-1] + result.ms)
            behind.append(result)
            if len(behind) > 1:  # its outcome is known when the next step has run
                known = behind.popleft()
                self._server.schedule.observe(known.record, [0], known.accepted.tolist())
        ends = np.searchsorted(tokens, first)
        return np.array(tokens)[ends] * self._truth.step_ms(1, 1, 0, CONTEXT) / np.array(ms)[ends]


def rate_of(tokens, gamma):
    """Return the acceptance of drafts that bring so many tokens per step if whole blocks are verified."""
    rates = np.linspace(0, 1, 2001)
    return rates[np.searchsorted((rates[:, None] ** np.arange(gamma + 1)).sum(1), tokens)]


def break_even(truth):
    """Return the tokens per step that pay for the cheapest step with drafts."""
    plain, *drafted = (truth.step_ms(1, 1 + n, n and truth.gamma, CONTEXT) for n in range(truth.gamma + 1))
    return min(drafted) / plain


OFTEN = {("CPU", "overconfident"), ("GPU", "calibrated"), ("costly tokens", "no head")}


@pytest.mark.parametrize(
    ("machine", "head"),
    [
        pytest.param(machine, head, marks=() if (machine, head) in OFTEN else pytest.mark.thorough)
        for machine in MACHINES
        for head in HEADS
    ],
)
def test_no_chat_is_slower_than_without_drafts_by_more_than_five_percent(machine, head):
    """Whatever the drafter is worth, seed by seed; and by no more than eight over its first 48 tokens."""
    truth, slowest = MACHINES[machine](), {}
    drafters = {str(tokens): [rate_of(tokens, truth.gamma)] for tokens in (1.0, 1.2, 1.34, break_even(truth))}
    drafters |= {"good": [GOOD], "easier": [USELESS, GOOD], "harder": [GOOD, 0.0]}
    for name, rates in drafters.items():
        runs = [FreshServer(truth, HEADS[head], seed).to_off(*rates, first=(48, TOKENS)) for seed in SEEDS]
        slowest[name] = np.min(runs, axis=0)
    assert min(early for early, _ in slowest.values()) > 0.92, slowest
    assert min(ratio for _, ratio in slowest.values()) > 0.95, slowest
    assert slowest["good"][1] > 1.9, slowest


@pytest.mark.parametrize("machine", MACHINES)
def test_a_server_that_has_seen_hard_chats_begins_the_next_one_as_it_expects(machine):
    for seed in SEEDS:
        server = FreshServer(MACHINES[machine](), 0.0, seed)
        first, _, third = (server.to_off(0.0, first=(48,))[0] for _ in range(3))
        assert 1 - third < 0.75 * (1 - first), seed


def measured_in_noise(table, what, factor):
    off = np.array([what in (ALL, drafts) or (what == DRAFTED and drafts > 0) for drafts in range(GAMMA + 1)])
    factors = np.where(off, factor, 1.0)[:, None]
    drafting = factor if what in (ALL, DRAFTED) else 1.0
    return replace(table, verify_ms=table.verify_ms * factors, draft_ms=table.draft_ms * drafting)


def all_to_off(rate, bias):
    """Return [noise, seed] how many times as fast as ``off`` chats get their tokens, by tables measured in noise."""
    truth = compute_bound(requests=(1,))
    noisy = [partial(measured_in_noise, what=what, factor=factor) for what, factor in NOISE]
    return np.array([[FreshServer(truth, bias, seed, table).to_off(rate)[0] for seed in SEEDS] for table in noisy])


NOISE = [
    *((RIGHT, 1.0), (ALL, 0.5), (ALL, 3.0), (DRAFTED, 3.0), (0, 3.0), (1, 0.5)),
    *((3, 0.5), (3, 3.0), (GAMMA, 0.5), (GAMMA, 3.0)),
]


@pytest.mark.parametrize(
    "head",
    ["overconfident", *(pytest.param(head, marks=pytest.mark.thorough) for head in ("calibrated", "no head"))],
)
def test_a_useless_drafter_costs_little_by_any_table(head):
    ratios = all_to_off(USELESS, HEADS[head])
    assert ratios.min() > 0.95, ratios


@pytest.mark.parametrize(
    ("rate", "least", "head"),
    [
        (MIDDLING, 1.03, "calibrated"),
        (GOOD, 2.0, "no head"),
        pytest.param(MIDDLING, 1.03, "no head", marks=pytest.mark.thorough),
        pytest.param(GOOD, 2.0, "calibrated", marks=pytest.mark.thorough),
    ],
)
def test_a_table_measured_in_noise_is_mended_within_the_first_answer(rate, least, head):
    ratios = all_to_off(rate, HEADS[head])
    assert ratios.mean(1).min() > least, ratios
