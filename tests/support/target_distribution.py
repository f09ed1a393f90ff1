"""Enumerates distributions of short texts, of the golden target and of the toy pair, and tests samples.

Combinations of many values are few: faults that take three of them to show are rare.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import scipy.stats
import torch
from dspark_kernels import ASKED_ROWS, KIND_ROWS, MOST_MATCH, NUM_ROWS, USUAL, Adjustment, SamplingBatch, SecondTexts
from dspark_kernels.sampling import target_probs
from golden_server import CASES, generate
from stage_loop import NO_CHAINS
from step_tables import make_table
from told_noise import ToldKeys, every_run
from toy_pair import GAMMA, ToyLoop, target_distribution
from transformers import AutoModelForCausalLM

from sglang_dspark.config import DSparkConfig
from sglang_dspark.draft.model import DraftModel
from sglang_dspark.scheduling.schedule import SloState
from sglang_dspark.scheduling.sps_table import SpsTable
from sglang_dspark.step.decision import StepDecision
from sglang_dspark.step.selection import FixedLength, TopK
from sglang_dspark.step.state import RequestLimits
from sglang_dspark.tools.launch import LaunchedServer

Tokens = tuple[int, ...]
Cell = tuple[int | None, ...]

MIN_EXPECTED = 8  # for the chi-square approximation
IMPOSSIBLE = 1e-7  # mass that float32 rounding may leave to tokens which a filter rules out


class TargetDistribution:
    """Probabilities of continuations under one set of sampling parameters."""

    def __init__(self, target: Path, prompt: Sequence[int], **parameters: float) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        self._prompt = list(prompt)
        self._parameters = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0} | parameters

    def cells(self, depth: int, min_prob: float) -> dict[Cell, float]:
        """A partition of the continuations of ``depth`` tokens into likely ones, with the probability of each cell.

        A prefix is followed token by token while its probability is at least ``min_prob``; ``(*prefix, None)`` is the
        cell of all other continuations of a prefix.
        """
        cells: dict[Cell, float] = {}
        frontier: dict[Tokens, float] = {(): 1.0}
        for _ in range(depth):
            longer: dict[Tokens, float] = {}
            for prefix, next_probs in zip(frontier, self._next_probs(list(frontier)), strict=True):
                row = next_probs * frontier[prefix]
                likely = (row >= min_prob).nonzero().flatten().tolist()
                longer |= {(*prefix, token): float(row[token]) for token in likely}
                row[likely] = 0
                cells[(*prefix, None)] = float(row.sum())
            frontier = longer
        return cells | frontier

    @torch.inference_mode()
    def _next_probs(self, prefixes: list[Tokens]) -> torch.Tensor:
        logits = self._next_logits(prefixes)
        columns = {f"{name}s": [value] * len(prefixes) for name, value in self._parameters.items()}
        rows = SamplingBatch.from_lists(**columns, seeds=[None] * len(prefixes))
        return target_probs(logits, rows.filter_params).double()

    def _next_logits(self, prefixes: list[Tokens]) -> torch.Tensor:
        logits: torch.Tensor = self._model(torch.tensor([[*self._prompt, *prefix] for prefix in prefixes])).logits
        return logits[:, -1]


def p_value(sample: Sequence[Tokens], cells: dict[Cell, float]) -> float:
    """Chi-square test of a sample against a partition; cells too rare for the test count as one."""
    num = len(sample)
    counts = Counter(_cell(tokens, cells) for tokens in sample)
    impossible = [cell for cell in counts if cells[cell] < IMPOSSIBLE]
    if impossible:
        return 0.0
    common = [cell for cell, prob in cells.items() if num * prob >= MIN_EXPECTED]
    observed = [counts[cell] for cell in common]
    expected = [num * cells[cell] for cell in common]
    rest = num - sum(expected)
    if rest >= MIN_EXPECTED:
        observed.append(num - sum(observed))
        expected.append(rest)
    scale = sum(observed) / sum(expected)
    return float(scipy.stats.chisquare(observed, [e * scale for e in expected]).pvalue)


def _cell(tokens: Tokens, cells: dict[Cell, float]) -> Cell:
    if tokens in cells:
        return tokens
    return next(cell for n in range(len(tokens), -1, -1) if (cell := (*tokens[:n], None)) in cells)


ALPHA = 1e-4
PROMPT = CASES[2]["prompt_ids"]
DEPTH = 4  # the first token comes from prefill, the others from a block
# The golden pair is confident and agrees with itself: hot enough that drafts and target differ at every position.
HOT = 2.0


def sample(
    server: LaunchedServer, parameters: dict[str, Any], num: int, depth: int = DEPTH, **fields: Any
) -> list[tuple[int, ...]]:
    """``num`` independent continuations of PROMPT by ``depth`` tokens."""
    group = 64
    body = {
        "input_ids": PROMPT,
        "sampling_params": {**parameters, "max_new_tokens": depth, "n": group, "ignore_eos": True},
        **fields,
    }
    answers = generate(server, [body] * (num // group), 4)
    return [tuple(choice["output_ids"]) for answer in answers for choice in answer]


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Combinations of one value of each axis, so many that every two values of different axes meet."""
    combinations = [tuple(enumerate(indices)) for indices in itertools.product(*(range(len(axis)) for axis in axes))]
    bits: dict[Any, int] = defaultdict(lambda: 1 << len(bits))  # of pairs
    pairs = [sum(bits[pair] for pair in itertools.combinations(combination, 2)) for combination in combinations]
    missing, chosen = sum(bits.values()), []
    while missing:
        best = max(range(len(pairs)), key=lambda place: (missing & pairs[place]).bit_count())
        missing &= ~pairs[best]
        chosen.append(tuple(axes[axis][index] for axis, index in combinations[best]))
    return chosen


ENUMERATED_PROMPT, TEMPERATURE = [1, 0], 0.8
ALL_TOKENS = [0, 1, 2, 1, 0]  # a prompt in which every text finds something
COMPETING = (1, *USUAL[1:])
COPYING = (1, MOST_MATCH, GAMMA, ASKED_ROWS)  # bounds of chains, see ChainRules
NO_FILTER = (-1, 1.0, 0.0)


def table(gamma: int) -> SpsTable:
    """Drafts cost so much that not all of them are worth it."""
    return make_table(lambda r, d, c: 4 + 1.5 * d * r, lambda r, d, c: 0.5 * r, gamma=gamma, requests=(1, 4))


def distribution_error(
    monkeypatch: pytest.MonkeyPatch,
    options: dict,
    length: int,
    *,
    requests: int = 1,
    filters: tuple[int, float, float] = NO_FILTER,
    adjustment: Adjustment | None = None,
    choose: Callable[[ToyLoop, StepDecision], StepDecision] = lambda loop, decision: decision,
    drafter: DraftModel | None = None,
    bounds: Sequence[tuple[int, int, int, int]] = (NO_CHAINS,),
    second: SecondTexts | None = None,
) -> float:
    """Largest error of the probability of a joint text of all requests.

    Args:
        length: tokens of each text, after the first.
        adjustment, bounds, second: see :class:`StageLoop`.
        choose: changes what the policy chose.
        drafter: in place of the usual one.
    """
    distribution: dict[tuple, float] = defaultdict(float)
    first, prompt = 0, ENUMERATED_PROMPT if tuple(bounds) == (NO_CHAINS,) else ALL_TOKENS
    gamma = DSparkConfig(**options).gamma(GAMMA if drafter is None else drafter.config.gamma)

    def serve(told):
        loop = ToyLoop(table(gamma), drafter, **options)
        loop.keys_of = partial(ToldKeys, told=told)
        loop.filters, loop.adjustment = filters, adjustment
        loop.bounds, loop.second = list(bounds), second
        # And nothing is learned.
        loop.schedule.forecast._chains.table = lambda *args: candidate_weights(gamma).numpy()
        loop.schedule.forecast.renew()
        chosen = loop.schedule.choose
        loop.schedule.choose = lambda *args, **kwargs: choose(loop, chosen(*args, **kwargs))
        return loop.serve([prompt] * requests, 1 + length, temperature=TEMPERATURE)

    for weight, texts in every_run(monkeypatch, serve):
        first = texts[0][0]
        distribution[tuple(tuple(text[1:]) for text in texts)] += weight
    assert sum(distribution.values()) == pytest.approx(1, abs=1e-12)
    rows = SamplingBatch.from_lists([TEMPERATURE], *([value] for value in filters), [None])
    one = target_distribution(prompt, first, length, rows.filter_params, adjustment)
    joint = {(): 1.0}
    for _ in range(requests):
        joint = {(*texts, text): p * q for texts, p in joint.items() for text, q in one.items()}
    return max(abs(distribution[texts] - probability) for texts, probability in joint.items())


STATIC, THRESHOLD = {"schedule": "static"}, {"schedule": "threshold", "confidence_threshold": 0.92}
POLICIES = {
    "off": {"schedule": "off"},
    "static": STATIC,
    "static-1": {"schedule": "static", "verify_len": 1},
    "threshold": THRESHOLD,
    "early-stop": {"schedule": "early-stop"},
    "auto": {},
}


FILTERS = {"top-k": (2, 1.0, 0.0), "top-p": (-1, 0.7, 0.0), "min-p": (-1, 1.0, 0.4), "all": (2, 0.8, 0.3)}


PENALTIES = {
    "frequency": Adjustment(frequency=0.9),
    "presence": Adjustment(presence=-1.2),
    "repetition": Adjustment(repetition=1.7),
    "all": Adjustment(frequency=0.4, presence=0.3, repetition=1.3, logit_bias={0: -0.8, 2: 0.5}),
}


def candidate_weights(gamma: int) -> torch.Tensor:
    """Boosts from nothing to all there is, by match and slot, and confidences on both sides of the drafter's."""
    matched = torch.arange(KIND_ROWS)[:, None]
    behind = (matched + torch.arange(gamma)).clamp_max(3)
    competing = torch.where(matched > 0, torch.tensor([0.0, 0.7, 3.0, 40.0])[behind], 0.0)
    boosts = torch.stack([competing, competing, 64.0 * (matched > 0).expand(-1, gamma)])
    least = torch.where(boosts > 0, behind - 1.5, -torch.inf)
    return torch.stack([boosts, least]).view(2, NUM_ROWS, gamma)


def half_of(loop: ToyLoop, decision: StepDecision) -> StepDecision:
    """Each request has a draft, and the better one is verified."""
    return StepDecision(1, TopK(len(loop.texts) // 2))


def paced(loop: ToyLoop, decision: StepDecision) -> StepDecision:
    """Each request has a draft, and one is verified: by SLOs and a clock that runs as the texts do."""
    lengths = [len(text) for text in loop.texts]
    now = sum(lengths) + (lengths[0] - lengths[-1]) ** 2
    slos = (SloState(tpot_ms, began_ms=2.0, first_tokens=len(ENUMERATED_PROMPT)) for tpot_ms in (1.0, 4.0))
    weights = [slo.weight(now, length) for slo, length in zip(slos, lengths, strict=True)]
    return StepDecision(1, TopK(1)).weighted(weights)


def half_of_all(loop: ToyLoop, decision: StepDecision) -> StepDecision:
    """The better half of all drafts is verified, which may be only one request's."""
    return StepDecision(loop.gamma, TopK(len(loop.texts) * loop.gamma // 2))


def one_of_a_block(loop: ToyLoop, decision: StepDecision) -> StepDecision:
    """A whole block is drafted, and its first draft is verified."""
    return StepDecision(GAMMA, TopK(1))


def one_of_two(loop: ToyLoop, decision: StepDecision) -> StepDecision:
    """Only the second request is drafted, as when a parked server probes."""
    return StepDecision(GAMMA, TopK(GAMMA, probe_request=1), draft_requests=(1,))


def bounded(loop: ToyLoop, decision: StepDecision) -> StepDecision:
    """The first request wants no draft verified, the second one those before the first of low confidence."""
    return StepDecision(GAMMA, TopK(2 * GAMMA)).within(RequestLimits((0, GAMMA), (0.0, 0.92)))


def third_of(loop: ToyLoop, decision: StepDecision) -> StepDecision:
    """Each of three requests has a draft, and the best one is verified."""
    return StepDecision(1, TopK(1))


def one_of_three(loop: ToyLoop, decision: StepDecision) -> StepDecision:
    """The middle request is drafted, its neighbours take a non-speculative step."""
    return StepDecision(GAMMA, TopK(GAMMA), draft_requests=(1,))


def all_but_the_first(loop: ToyLoop, decision: StepDecision) -> StepDecision:
    """The first request wants nothing verified, the others have a draft each."""
    return StepDecision(1, FixedLength()).within(RequestLimits((0, 1, 1)))
