"""The law of the output, by going through every outcome of the noise: no sampling, so no error of sampling.

A toy pair is decoded by the served stages: policy, drafter, Markov walk, plan, acceptance, commit. Every random number
takes every value that makes a difference, and the probabilities of the runs add up to the law of the text, which has to
be the target's. Planted leaks show that a wrong law is found.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from dspark_kernels import SamplingRows
from dspark_kernels.judging import acceptance_reference
from dspark_kernels.sampling.noise import Purpose, RoundKeys
from told_noise import every_run
from toy_pair import GAMMA, ToyLoop, target_law

from sglang_dspark.scheduling import admission, schedule
from sglang_dspark.scheduling.forecast import Forecast
from sglang_dspark.scheduling.sps_table import SpsTable
from sglang_dspark.step.choice import Choice, Rule
from sglang_dspark.step.confidence import Confidence
from sglang_dspark.step.limits import Limits
from sglang_dspark.worker.drafter import Drafter

pytestmark = pytest.mark.slow

TOLERANCE = 2e-7  # the served laws are float32, and so is the difference of two of them
LEAK = 1e-4
PROMPT, TEMPERATURE = [1, 0], 0.8
NO_FILTER = (-1, 1.0, 0.0)


def table() -> SpsTable:
    """Drafts cost so much that not all of them are worth it."""
    drafts, requests = np.arange(GAMMA + 1.0), np.array([[1.0], [4.0]])
    verify, draft = 4 + 1.5 * drafts * requests, np.where(drafts > 0, 0.5, 0.0) * requests
    return SpsTable({}, [1, 4], range(GAMMA + 1), [64], draft[..., None], verify[..., None])


def law_error(
    monkeypatch: pytest.MonkeyPatch,
    options: dict,
    length: int,
    *,
    requests: int = 1,
    filters: tuple[int, float, float] = NO_FILTER,
    choose: Callable[[ToyLoop, Choice], Choice] = lambda loop, choice: choice,
) -> float:
    """Largest error of the probability of a joint text of all requests.

    Args:
        length: tokens of each text, after the first.
        choose: changes what the policy chose.
    """
    law: dict[tuple, float] = defaultdict(float)
    first = 0

    def serve():
        loop = ToyLoop(table(), **options)
        loop.filters = filters
        chosen = loop.schedule.choose
        loop.schedule.choose = lambda *args, **kwargs: choose(loop, chosen(*args, **kwargs))
        return loop.serve([PROMPT] * requests, 1 + length, temperature=TEMPERATURE)

    for weight, texts in every_run(monkeypatch, serve):
        first = texts[0][0]
        law[tuple(tuple(text[1:]) for text in texts)] += weight
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    rows = SamplingRows.from_lists([TEMPERATURE], *([value] for value in filters), [None])
    one = target_law(PROMPT, first, length, rows.law)
    joint = {(): 1.0}
    for _ in range(requests):
        joint = {(*texts, text): p * q for texts, p in joint.items() for text, q in one.items()}
    return max(abs(law[texts] - probability) for texts, probability in joint.items())


STATIC, THRESHOLD = {"schedule": "static"}, {"schedule": "threshold", "confidence_threshold": 0.92}
POLICIES = {
    "off": {"schedule": "off"},
    "static": STATIC,
    "static-1": {"schedule": "static", "verify_len": 1},
    "threshold": THRESHOLD,
    "early-stop": {"schedule": "early-stop"},
    "adaptive-block": {"schedule": "adaptive-block"},
    "auto": {},
}


@pytest.mark.parametrize("policy", POLICIES)
def test_two_rounds_of_one_request(monkeypatch, policy):
    """The second round draws again what the first one did not verify."""
    assert law_error(monkeypatch, POLICIES[policy], 2) < TOLERANCE


def half_of(loop: ToyLoop, choice: Choice) -> Choice:
    """Each request has a draft, and the better one is verified."""
    return Choice(Rule.TOP, 1, len(loop.texts) // 2)


def one_of_a_block(loop: ToyLoop, choice: Choice) -> Choice:
    """A whole block is drafted, and its first draft is verified."""
    return Choice(Rule.TOP, GAMMA, 1)


def one_of_two(loop: ToyLoop, choice: Choice) -> Choice:
    """Only the second request is drafted, as when a parked server probes."""
    return Choice(Rule.TOP, GAMMA, GAMMA, forced=1, drafted=(1,))


def bounded(loop: ToyLoop, choice: Choice) -> Choice:
    """The first request wants no draft verified, the second one those before the first of low confidence."""
    return Choice(Rule.TOP, GAMMA, 2 * GAMMA).within(Limits((0, GAMMA), (0, 0), (0.0, 0.92)))


@pytest.mark.parametrize("choose", [half_of, one_of_two, bounded])
def test_two_requests_that_share_a_step(monkeypatch, choose):
    """Their joint law: neither may know of the other."""
    assert law_error(monkeypatch, {}, 1, requests=2, choose=choose) < TOLERANCE


@pytest.mark.parametrize("filters", [(2, 1.0, 0.0), (-1, 0.7, 0.0), (-1, 1.0, 0.4)], ids=["top-k", "top-p", "min-p"])
def test_filters(monkeypatch, filters):
    assert law_error(monkeypatch, STATIC, 1, filters=filters) < TOLERANCE


def after(monkeypatch, owner, name, change):
    """Let ``change`` turn the result of a served function, given its arguments, into another one."""
    served = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: change(served(*args, **kwargs), *args, **kwargs))


def likes_a_token(survival, tokens):
    """Survivals that know the drafts: token 0 is believed, others are not."""
    return torch.where(tokens[:, : survival.shape[1]] == 0, 0.9, 0.05).cummin(1).values


def ranked_by_value(monkeypatch):
    after(monkeypatch, admission, "ranked", lambda order, choice, drafted: likes_a_token(order, drafted.block.tokens))


def budget_by_successor(monkeypatch):
    """The last draft's survival knows the first draft."""

    def change(admitted, choice, drafted, *rest):
        return replace(admitted, budget=GAMMA if drafted.survival[0, 1] > 0.92 * drafted.survival[0, 0] else 0)

    after(monkeypatch, schedule, "admit", change)


def budget_by_value(monkeypatch):
    def change(admitted, choice, drafted, *rest):
        return replace(admitted, budget=GAMMA * int(drafted.block.tokens[0, 0] == 0))

    after(monkeypatch, schedule, "admit", change)


def bound_by_value(monkeypatch):
    def change(lens, confidence, threshold):
        return GAMMA * (confidence[:, 1] > 0.92).long()

    after(monkeypatch, admission, "above_threshold", change)


def same_noise_in_every_round(monkeypatch):
    after(monkeypatch, RoundKeys, "block_uniform", lambda _, keys, *args: uniform_of(replace(keys, step=0), *args))


uniform_of = RoundKeys.block_uniform


def accept_with_the_drafts_noise(monkeypatch):
    monkeypatch.setattr(RoundKeys, "block_uniform", lambda keys, gamma, purpose: uniform_of(keys, gamma, Purpose.DRAFT))


def one_number_for_all_slots(monkeypatch):
    after(monkeypatch, RoundKeys, "block_uniform", lambda uniforms, *_: uniforms[:, :1].expand_as(uniforms))


def one_number_for_all_requests(monkeypatch):
    after(monkeypatch, RoundKeys, "block_uniform", lambda uniforms, *_: uniforms[:1].expand_as(uniforms))


def correction_with_the_noise_of_acceptance(monkeypatch):
    served = RoundKeys.uniform
    monkeypatch.setattr(RoundKeys, "uniform", lambda keys, slots, purpose: served(keys, slots, Purpose.ACCEPT))


def correction_from_the_target(monkeypatch):
    after(monkeypatch, acceptance_reference, "_residual", lambda _, target, *rest: target)


def correction_against_a_uniform_draft(monkeypatch):
    def change(_, target, draft, *rest):
        return (target - torch.full_like(draft, 1 / draft.shape[-1])).clamp_min(0.0)

    after(monkeypatch, acceptance_reference, "_residual", change)


def correction_of_the_whole_difference(monkeypatch):
    after(monkeypatch, acceptance_reference, "_residual", lambda _, target, draft, *rest: (target - draft).abs())


def correction_forgets_the_draft(monkeypatch):
    def change(residual, target, draft, tokens, copied):
        return target.scatter(1, tokens[:, None], 0.0)

    after(monkeypatch, acceptance_reference, "_residual", change)


def law_of(change):
    """The drafter's law is reported otherwise than it was drawn from."""

    def leak(monkeypatch):
        after(monkeypatch, Drafter, "propose", lambda block, *_, **__: replace(block, probs=change(block.probs)))

    leak.__name__ = change.__name__
    return leak


def law_of_another_temperature(probs):
    return probs.sqrt() / probs.sqrt().sum(-1, keepdim=True)


def law_of_the_slot_before(probs):
    return probs.roll(1, dims=1)


def law_that_is_one_hot(probs):
    return torch.nn.functional.one_hot(probs.argmax(-1), probs.shape[-1]).float()


def uniform_law(probs):
    return torch.full_like(probs, 1 / probs.shape[-1])


def tokens_changed_behind_the_law(monkeypatch):
    after(monkeypatch, Drafter, "propose", lambda block, *_, **__: replace(block, tokens=(block.tokens + 1) % 3))


def rows_of_the_next_draft(monkeypatch):
    after(monkeypatch, ToyLoop, "_verify", lambda output, *_: shifted(output, 1))


def rows_of_the_draft_before(monkeypatch):
    after(monkeypatch, ToyLoop, "_verify", lambda output, *_: shifted(output, -1))


def shifted(output, by):
    output.logits_output.next_token_logits = output.logits_output.next_token_logits.roll(-by, 0)
    return output


def first_draft_always_kept(monkeypatch):
    def change(lens, kept, verify_lens):
        return torch.maximum(lens, verify_lens.clamp_max(1))

    after(monkeypatch, acceptance_reference, "_leading_run", change)


def last_kept_draft_dropped(monkeypatch):
    after(monkeypatch, acceptance_reference, "_leading_run", lambda lens, *_: (lens - 1).clamp_min(0))


def unverified_drafts_kept(monkeypatch):
    served = acceptance_reference._leading_run
    whole = lambda kept, verify_lens: served(kept, torch.full_like(verify_lens, kept.shape[1]))  # noqa: E731
    monkeypatch.setattr(acceptance_reference, "_leading_run", whole)


def survival_by_value(monkeypatch):
    def change(confidence, forecast, logits, bs, depth, *rest):
        survival = torch.where(drafts[-1][:, :depth] == 0, 0.9, 0.1).cummin(1).values
        return Confidence(logits, survival)

    drafts = []
    after(monkeypatch, Drafter, "propose", lambda block, *_, **__: drafts.append(block.tokens) or block)
    after(monkeypatch, Forecast, "predict", change)


LEAKS = [
    (ranked_by_value, {}, {"requests": 2, "choose": half_of}),
    (budget_by_successor, {}, {"choose": one_of_a_block}),
    (budget_by_value, {}, {"choose": one_of_a_block}),
    (bound_by_value, THRESHOLD, {}),
    (survival_by_value, {}, {"requests": 2, "choose": half_of}),
    (same_noise_in_every_round, {"schedule": "static", "verify_len": 1}, {"length": 2}),
    (accept_with_the_drafts_noise, STATIC, {}),
    (one_number_for_all_slots, STATIC, {"length": 2}),
    (one_number_for_all_requests, {"schedule": "static", "verify_len": 1}, {"requests": 2}),
    (correction_with_the_noise_of_acceptance, STATIC, {}),
    (correction_from_the_target, STATIC, {}),
    (correction_against_a_uniform_draft, STATIC, {}),
    (correction_of_the_whole_difference, STATIC, {}),
    (correction_forgets_the_draft, STATIC, {}),
    (law_of(law_of_another_temperature), STATIC, {}),
    (law_of(law_of_the_slot_before), STATIC, {}),
    (law_of(law_that_is_one_hot), STATIC, {}),
    (law_of(uniform_law), STATIC, {}),
    (tokens_changed_behind_the_law, STATIC, {}),
    (rows_of_the_next_draft, STATIC, {}),
    (rows_of_the_draft_before, STATIC, {}),
    (first_draft_always_kept, STATIC, {}),
    (last_kept_draft_dropped, STATIC, {"length": 2}),
    (unverified_drafts_kept, {}, {"choose": one_of_a_block, "length": 2}),
]


@pytest.mark.parametrize(("leak", "options", "how"), LEAKS, ids=[leak.__name__ for leak, _, _ in LEAKS])
def test_a_leak_is_found(monkeypatch, leak, options, how):
    leak(monkeypatch)
    assert law_error(monkeypatch, options, **{"length": 1, **how}) > LEAK
