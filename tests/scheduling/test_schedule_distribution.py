"""The schedule of a server, all of it, over many steps of one batch: the text follows the target throughout.

What the real loop does between steps is done here, and worse: survivals are observed two steps late, the calibration is
refitted, parking toggles and probes come at moments that the tokens of the last step decide.
"""

import itertools

import numpy as np
import pytest
import torch
from confident_pair import ConfidentPair
from dspark_kernels import DraftBlock
from step_tables import make_table

from sglang_dspark.calibration.online import OnlineCalibration
from sglang_dspark.config import DSparkConfig
from sglang_dspark.scheduling.promises import Pace
from sglang_dspark.scheduling.schedule import Schedule
from sglang_dspark.step.limits import RequestLimits
from sglang_dspark.step.record import StepRecord
from sglang_dspark.step.state import DraftOutput

pytestmark = pytest.mark.slow

ALPHA = 1e-4
BS, NUM_STEPS, GAMMA = 32, 400, 3
REQUESTS = [f"r{row}" for row in range(BS)]
CPU = torch.device("cpu")


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


def drafted_by(block, schedule, decision):
    """Draft like the worker: cut to the depth, or of one request alone; the head is far from calibrated."""
    if decision.draft_len == 0:
        return DraftOutput(DraftBlock.empty(BS, "cpu"), None, [0] * BS)
    block = DraftBlock(
        block.tokens[:, : decision.draft_len],
        block.probs[:, : decision.draft_len],
        3 * block.confidence_logits[:, : decision.draft_len],
    )
    if decision.draft_requests is not None:
        part = torch.tensor(decision.draft_requests)
        some = DraftBlock(block.tokens[part], block.probs[part], block.confidence_logits[part])
        block = some.spread(part, BS)
    confidence = schedule.forecast.predict(block.confidence_logits, BS, decision.draft_len)
    return DraftOutput(block, confidence, decision.draft_lens(BS))


def serve(
    model, schedule, meddle=lambda schedule, step, out_tokens: None, ask=lambda anchors: None, weigh=lambda *told: None
):
    """Anchors [n] and emitted tokens [n, gamma + 1] of all rounds, and the choices made.

    ``ask`` gives the requests' limits, ``weigh`` their weights by what has been emitted.
    """
    anchors = torch.arange(BS) % model.vocab_size
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
    """The clock runs by what was emitted, and every third request is promised nothing."""
    paces = [Pace(None if row % 3 == 0 else 6.0 + row, began_ms=0.0, first_tokens=1) for row in range(BS)]
    sent, seen, clock = np.ones(BS), set(), [0.0]

    def weigh(step, out_tokens):
        tokens = (out_tokens >= 0).sum(1).numpy() * (step > 0)
        sent[:] += tokens
        clock[0] += 20 + tokens.sum() % 7
        weights = [pace.counts(clock[0], int(count)) for pace, count in zip(paces, sent, strict=True)]
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
