"""The distribution of the toy pair's served texts, summed over every outcome of the noise, beside the target's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from dspark_kernels import ASKED_ROWS, KIND_ROWS, MOST_MATCH, NUM_ROWS, USUAL, Adjustment, SamplingBatch, SecondTexts
from stage_loop import NO_CHAINS
from step_tables import make_table
from told_noise import ToldKeys, every_run
from toy_pair import GAMMA, ToyLoop, target_distribution

from sglang_dspark.config import DSparkConfig
from sglang_dspark.draft.model import DraftModel
from sglang_dspark.scheduling.schedule import SloState
from sglang_dspark.scheduling.sps_table import SpsTable
from sglang_dspark.step.decision import StepDecision
from sglang_dspark.step.selection import FixedLength, TopK
from sglang_dspark.step.state import RequestLimits

PROMPT, TEMPERATURE = [1, 0], 0.8
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
    first, prompt = 0, PROMPT if tuple(bounds) == (NO_CHAINS,) else ALL_TOKENS
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
    slos = (SloState(tpot_ms, began_ms=2.0, first_tokens=len(PROMPT)) for tpot_ms in (1.0, 4.0))
    weights = [slo.weight(now, length) for slo, length in zip(slos, lengths, strict=True)]
    return StepDecision(1, TopK(1)).weighted(weights)


def half_of_all(loop: ToyLoop, decision: StepDecision) -> StepDecision:
    """The better half of all drafts is verified, which may be one request's alone."""
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
    """The middle request is drafted, its neighbours take a plain step."""
    return StepDecision(GAMMA, TopK(GAMMA), draft_requests=(1,))


def all_but_the_first(loop: ToyLoop, decision: StepDecision) -> StepDecision:
    """The first request wants nothing verified, the others have a draft each."""
    return StepDecision(1, FixedLength()).within(RequestLimits((0, 1, 1)))
