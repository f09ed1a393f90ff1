"""The schedule of a server, all of it, over many steps of one batch: the text follows the target throughout.

What the real loop does between steps is done here, and worse: survivals are observed two steps late, the calibration is
refitted, parking toggles and probes come at moments that the tokens of the last step decide.
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from draft_heads import as_weights, draft_heads
from dspark_kernels import (
    AcceptResult,
    DraftBlock,
    DraftDistribution,
    RoundKeys,
    SamplingBatch,
    Windows,
    accept,
    draft_block,
)
from scipy import stats
from step_tables import make_table

from sglang_dspark.config import DSparkConfig
from sglang_dspark.scheduling.online_calibration import OnlineCalibration
from sglang_dspark.scheduling.schedule import Schedule, SloState
from sglang_dspark.step.decision import StepRecord
from sglang_dspark.step.state import DraftOutput, RequestLimits

pytestmark = pytest.mark.slow

ALPHA = 1e-4
BS, NUM_STEPS, GAMMA, V = 32, 400, 3, 6
REQUESTS = [f"r{row}" for row in range(BS)]
CPU = torch.device("cpu")
MIN_EXPECTED = 5  # of a cell of a chi-square test; tokens that are rarer share one


class ConfidentPair:
    """A target that is a table by previous token, and the real vanilla Markov head imitating it with errors.

    The probability that a draft is accepted, given the token before it, is the overlap of the two distributions there.
    A head that reports exactly this reveals as much about the draft before as any head could: what a leaky rule needs.
    Distributions are flat, so that every token comes up, and the drafter is good after even tokens and bad after odd
    ones.

    Attributes:
        overlap: [gamma, V] probability that draft j is accepted, by the token before it.
    """

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.target_logits = torch.randn(V, V, generator=generator) * 1.5 * 0.5  # [previous, V]
        self._base_logits = torch.randn(GAMMA, V, generator=generator) * 0.12
        errors = torch.randn(V, V, generator=generator) * torch.tensor([0.6, 3.0])[torch.arange(V) % 2, None]
        bias = self.target_logits + errors
        markov, _ = draft_heads("vanilla", vocab_size=V, hidden_size=2, block_size=GAMMA, rank=V)
        markov.markov_w1.weight.data = torch.eye(V)
        markov.markov_w2.weight.data = bias.T.contiguous()
        self._heads = as_weights(markov, None)
        self.target = self.target_logits.softmax(-1)  # [previous, V]
        draft = (self._base_logits[:, None] + bias).softmax(-1)
        self.overlap = torch.minimum(draft, self.target).sum(-1)

    def draft(self, anchors: torch.Tensor, step: int) -> DraftBlock:
        """A block per request; its confidences are logits of the overlap."""
        bs = len(anchors)
        block = draft_block.reference(
            self._base_logits.expand(bs, -1, -1),
            torch.zeros(bs, GAMMA, 2),
            anchors,
            self._heads,
            self._rows(bs),
            self.keys(bs, step),
        )
        before = torch.cat([anchors[:, None], block.tokens[:, :-1]], dim=1)
        confidence = self.overlap[torch.arange(GAMMA), before]
        return replace(block, confidence_logits=torch.logit(confidence, eps=1e-6))

    def _rows(self, bs: int) -> SamplingBatch:
        return SamplingBatch.from_lists(*([value] * bs for value in (1.0, -1, 1.0, 0.0, None)))

    def keys(self, bs: int, step: int) -> RoundKeys:
        return RoundKeys(11, step, torch.arange(bs), torch.zeros(bs, dtype=torch.int64))

    def accept(self, anchors: torch.Tensor, block: DraftBlock, lens: torch.Tensor, step: int) -> AcceptResult:
        """Verify the first ``lens`` drafts."""
        chain = torch.cat([anchors[:, None], block.tokens], dim=1)
        logits = self.target_logits[chain[torch.arange(chain.shape[1]) <= lens[:, None]]]
        indptr = torch.nn.functional.pad((lens + 1).cumsum(0), (1, 0))
        rows, keys = self._rows(len(lens)), self.keys(len(lens), step)
        return accept.reference(block, Windows(lens, indptr), logits, keys.positions, rows, keys)

    def distribution_p_value(self, anchors: torch.Tensor, out_tokens: torch.Tensor) -> float:
        """Chi-square: does every emitted token [n, gamma + 1] follow the target, given the token before it?

        One cell per slot, token before and token: what a scheduler favours differs between tokens.
        """
        target = self.target.double()
        chain = torch.cat([anchors[:, None], out_tokens], dim=1)
        statistic, freedom = 0.0, 0
        for before, tokens in zip(chain.T, out_tokens.T, strict=False):
            emitted = tokens >= 0
            for previous in range(V):
                counts = torch.bincount(tokens[emitted & (before == previous)], minlength=V).double()
                expected = counts.sum() * target[previous]
                rare = expected < MIN_EXPECTED
                observed = torch.cat([counts[~rare], counts[rare].sum()[None]])
                expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
                used = expected >= MIN_EXPECTED
                statistic += float(((observed - expected)[used] ** 2 / expected[used]).sum())
                freedom += max(0, int(used.sum()) - 1)
        return float(stats.chi2.sf(statistic, freedom))


def make_schedule(options):
    calibration = OnlineCalibration(GAMMA)
    schedule = Schedule(options, GAMMA, calibration, CPU)
    table = make_table(
        lambda r, d, c: 10 + 0.05 * r * (1 + d) + np.maximum(r * (1 + d) - 64, 0) * 0.2,
        lambda r, d, c: 2 + 0.5 * d + 0 * r,
        gamma=GAMMA,
    )
    schedule.start(table)
    return schedule


def of_depth(block, depth, requests):
    """The first drafts of some requests' blocks."""
    drawn = block.distribution
    distribution = DraftDistribution(drawn.scores[requests, :depth], drawn.log_norms[requests, :depth])
    return DraftBlock(block.tokens[requests, :depth], block.confidence_logits[requests, :depth], distribution)


def drafted_by(block, schedule, decision):
    """Draft like the worker: cut to the depth, or of one request alone; the head is far from calibrated."""
    if decision.draft_len == 0:
        return DraftOutput(DraftBlock.empty(BS, "cpu"), None, [0] * BS)
    block = of_depth(block, decision.draft_len, slice(None))
    if decision.draft_requests is not None:
        part = torch.tensor(decision.draft_requests)
        block = of_depth(block, decision.draft_len, part).spread(part, BS)
    block = replace(block, confidence_logits=3 * block.confidence_logits)
    confidence = schedule.forecast.predict(block.confidence_logits, BS, decision.draft_len)
    return DraftOutput(block, confidence, decision.draft_lens(BS))


def serve(
    model, schedule, meddle=lambda schedule, step, out_tokens: None, ask=lambda anchors: None, weigh=lambda *told: None
):
    """Anchors [n] and emitted tokens [n, gamma + 1] of all rounds, and the choices made.

    ``ask`` gives the requests' limits, ``weigh`` their weights by what has been emitted.
    """
    anchors = torch.arange(BS) % V
    out_tokens = torch.zeros(BS, GAMMA + 1, dtype=torch.int64)
    on_the_way, choices, history = [], [], []
    for step in range(NUM_STEPS):
        meddle(schedule, step, out_tokens)
        decision = schedule.choose(REQUESTS, 100.0, ask(anchors), weigh(step, out_tokens))
        block = model.draft(anchors, step)
        drafted = drafted_by(block, schedule, decision)
        lens = decision.select(drafted).verify_lens
        on_the_way.append(StepRecord(REQUESTS, decision, drafted.draft_lens, lens, drafted.confidence, None))
        accepted = model.accept(anchors, block, lens, step)
        history.append((anchors, accepted))
        anchors, out_tokens = accepted.bonus_tokens, accepted.out_tokens
        choices.append((decision, lens))
        if len(on_the_way) > 2:
            record = on_the_way.pop(0)
            schedule.observe(record, list(range(BS)), history[step - 2][1].accept_lens.tolist())
    return (
        torch.cat([anchors for anchors, _ in history]),
        torch.cat([accepted.out_tokens for _, accepted in history]),
        choices,
    )


def meddling(schedule, step, out_tokens):
    """Parks, resumes and probes as the last tokens say, and not as the policy itself would."""
    told = int(out_tokens.clamp_min(0).sum())
    schedule.policy.survivals.num_observed = 0  # the policy itself neither parks nor resumes
    schedule.policy.parked = bool(told // 7 % 2) and step % 3 != 0
    if told % 3 == 0:
        schedule.policy._steps_to_probe = schedule.policy._steps_to_explore - 1
        schedule.policy._trial_cost = 0.0


OPTIONS = {
    "static": DSparkConfig(schedule="static", verify_len=2),
    "early-stop": DSparkConfig(schedule="early-stop"),
    "threshold": DSparkConfig(schedule="threshold", confidence_threshold=0.6),
}


@pytest.fixture(scope="module")
def model():
    return ConfidentPair()


def every_kind_of_ask(anchors):
    """Return limits of which every fourth is at most one draft, and every fourth a bound by confidence."""
    kind = torch.arange(BS) % 4
    most = torch.where(kind == 1, 1, GAMMA)
    bounds = torch.where(kind == 2, 0.8, 0.0)
    return RequestLimits(tuple(most.tolist()), tuple(bounds.tolist()))


@pytest.mark.parametrize("name", [*OPTIONS, "auto", "off"])
def test_the_text_follows_the_target_whatever_requests_ask_for(model, name):
    schedule = make_schedule(OPTIONS.get(name) or DSparkConfig(schedule=name))
    meddle = {"meddle": meddling} if name == "auto" else {}
    anchors, out_tokens, choices = serve(model, schedule, ask=every_kind_of_ask, **meddle)
    assert model.distribution_p_value(anchors, out_tokens) > ALPHA
    lens = torch.stack([lens for _, lens in choices])
    assert (lens[:, 1::4] <= 1).all()


def test_the_text_follows_the_target_while_weights_move_with_the_clock(model):
    """The clock runs by what was emitted, and every third request has no SLO."""
    slos = [SloState(None if row % 3 == 0 else 6.0 + row, began_ms=0.0, first_tokens=1) for row in range(BS)]
    sent, seen, clock = np.ones(BS), set(), [0.0]

    def weigh(step, out_tokens):
        tokens = (out_tokens >= 0).sum(1).numpy() * (step > 0)
        sent[:] += tokens
        clock[0] += 20 + tokens.sum() % 7
        weights = [slo.weight(clock[0], int(count)) for slo, count in zip(slos, sent, strict=True)]
        seen.update(weights)
        return weights

    schedule = make_schedule(DSparkConfig())
    anchors, out_tokens, choices = serve(model, schedule, weigh=weigh)
    assert model.distribution_p_value(anchors, out_tokens) > ALPHA
    trimmed = [lens for decision, lens in choices if decision.draft_len and lens.sum() < BS * GAMMA]
    assert len(seen) > 100 and len(trimmed) > NUM_STEPS / 4


def kinds(choices):
    """The record of a step: the kinds of decision that the policy ``auto`` knows."""
    for decision, lens in choices:
        if decision.draft_len == 0:
            yield "plain"
        elif decision.draft_requests is not None:
            yield "one request alone"
        elif decision.selection.probe_request is not None:
            yield "one request forced"
        else:
            yield "trimmed" if lens.sum() < BS * GAMMA else "whole"


def test_the_text_follows_the_target_while_auto_parks_probes_and_recalibrates(model):
    schedule = make_schedule(DSparkConfig())
    anchors, out_tokens, choices = serve(model, schedule, meddling)
    assert model.distribution_p_value(anchors, out_tokens) > ALPHA
    seen = list(kinds(choices))
    assert {kind: seen.count(kind) > 5 for kind in set(seen)} == dict.fromkeys(
        ("plain", "one request alone", "one request forced", "trimmed"), True
    )
    assert len({decision.draft_len for decision, _ in choices}) > 2
    toggles = sum(a != b for a, b in itertools.pairwise(kind == "plain" for kind in seen))
    assert toggles > NUM_STEPS / 10
