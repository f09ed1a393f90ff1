"""Planted leaks: each uses what it must not know about a draft, or draws from a wrong distribution, and is found."""

from __future__ import annotations

from dataclasses import replace

import pytest
import stage_loop
import torch
from dspark_kernels import AdjustmentTable, Candidates, DraftBlock
from dspark_kernels.acceptance import acceptance_reference
from dspark_kernels.drafting import walk_reference
from dspark_kernels.sampling.noise import Purpose, RoundKeys
from enumerated_distribution import (
    COMPETING,
    COPYING,
    PENALTIES,
    STATIC,
    THRESHOLD,
    distribution_error,
    half_of,
    half_of_all,
    one_of_a_block,
)
from switches import SWITCHES
from toy_pair import GAMMA, ToyLoop, V, toy_drafter

from sglang_dspark.scheduling.forecast import Forecast
from sglang_dspark.step import selection
from sglang_dspark.step.confidence import Confidence
from sglang_dspark.step.decision import StepDecision
from sglang_dspark.step.selection import TopK
from sglang_dspark.worker.drafter import Drafter

pytestmark = pytest.mark.slow

LEAK = 1e-4


def after(monkeypatch, owner, name, change):
    """Let ``change`` turn the result of a served function, given its arguments, into another one."""
    served = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: change(served(*args, **kwargs), *args, **kwargs))


def likes_a_token(survival, tokens):
    """Survivals that know the drafts: token 0 is believed, others are not."""
    return torch.where(tokens[:, : survival.shape[1]] == 0, 0.9, 0.05).cummin(1).values


def ranked_by_value(monkeypatch):
    after(monkeypatch, TopK, "_order", lambda order, rule, drafted, *rest: likes_a_token(order, drafted.block.tokens))


def budget_by_successor(monkeypatch):
    """The last draft's survival knows the first draft."""

    def change(selected, decision, drafted):
        return replace(selected, budget=GAMMA if drafted.survival[0, 1] > 0.92 * drafted.survival[0, 0] else 0)

    after(monkeypatch, StepDecision, "select", change)


def bound_by_value(monkeypatch):
    def change(lens, confidence, threshold):
        return GAMMA * (confidence[:, 1] > 0.92).long()

    after(monkeypatch, selection, "above_threshold", change)


def same_noise_in_every_round(monkeypatch):
    after(monkeypatch, RoundKeys, "block_uniform", lambda _, keys, *args: uniform_of(replace(keys, step=0), *args))


uniform_of = RoundKeys.block_uniform


def accept_with_the_drafts_noise(monkeypatch):
    monkeypatch.setattr(RoundKeys, "block_uniform", lambda keys, gamma, purpose: uniform_of(keys, gamma, Purpose.DRAFT))


def one_number_for_all_requests(monkeypatch):
    after(monkeypatch, RoundKeys, "block_uniform", lambda uniforms, *_: uniforms[:1].expand_as(uniforms))


def correction_with_the_noise_of_acceptance(monkeypatch):
    served = RoundKeys.uniform
    monkeypatch.setattr(RoundKeys, "uniform", lambda keys, slots, purpose: served(keys, slots, Purpose.ACCEPT))


def correction_from_the_target(monkeypatch):
    after(monkeypatch, acceptance_reference, "_residual", lambda _, target, *rest: target)


def distribution_of_another_temperature(monkeypatch):
    """The drafter's distribution is reported otherwise than it was drawn from."""

    def change(block, *_, **__):
        return replace(block, probs=block.probs.sqrt() / block.probs.sqrt().sum(-1, keepdim=True))

    after(monkeypatch, Drafter, "propose", change)


def rows_of_the_next_draft(monkeypatch):
    def change(output, *_):
        output.logits_output.next_token_logits = output.logits_output.next_token_logits.roll(-1, 0)
        return output

    after(monkeypatch, ToyLoop, "_verify", change)


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


def penalties_without_the_drafts(monkeypatch):
    """Every row of a window is adjusted as the first one."""
    served = stage_loop.adjust
    change = lambda logits, table, slots, requests, columns, *rest: served(  # noqa: E731
        logits, table, slots, requests, torch.zeros_like(columns), *rest
    )
    monkeypatch.setattr(stage_loop, "adjust", change)


def penalties_of_the_step_before(monkeypatch):
    """Nothing that a step commits is counted."""
    monkeypatch.setattr(AdjustmentTable, "count", lambda *_: None)


def copies_weighed_by_the_drafters_distribution(monkeypatch):
    after(monkeypatch, DraftBlock, "with_candidates", lambda block, *_: replace(block, copied=None))


def drafts_judged_as_copies(monkeypatch):
    """Drawn drafts are kept as if nothing else could have been proposed, and corrected as what they are."""
    all_copied = lambda block, *_, **__: replace(block, copied=torch.ones_like(block.tokens) > 0)  # noqa: E731
    after(monkeypatch, Drafter, "propose", all_copied)
    difference = lambda _, target, draft, *rest: (target - draft).clamp_min(0.0)  # noqa: E731
    after(monkeypatch, acceptance_reference, "_residual", difference)


def copies_that_are_never_corrected(monkeypatch):
    """A rejected copy may come back as its own correction."""

    def change(residual, target, draft, tokens, copied):
        return target if draft is None or copied is not None else residual

    after(monkeypatch, acceptance_reference, "_residual", change)


def distributions_at_another_temperature(monkeypatch):
    served = acceptance_reference.target_probs
    monkeypatch.setattr(acceptance_reference, "target_probs", lambda logits, params: served(logits * 0.97, params))


def forced_by_value(monkeypatch):
    """A request is verified whatever its survival where its draft is a certain token."""

    def change(order, rule, drafted, *rest):
        return torch.where(drafted.block.tokens[:, : order.shape[1]] == 1, 2.0, order)

    after(monkeypatch, TopK, "_order", change)


def candidates_of(block):
    """Candidates [bs, gamma], and where their chains are alive."""
    slots = torch.arange(block.tokens.shape[1])
    return block.chains[:, 2:][:, : len(slots)], block.chains[:, 1:2] >= slots


def raised(block, tokens, alive):
    """The block with a distribution in which ``tokens`` have other odds."""
    there = torch.nn.functional.one_hot(tokens.clamp_min(0), V) * (alive & (tokens >= 0))[..., None]
    probs = block.probs * (3.0 * there).exp()
    return replace(block, probs=probs / probs.sum(-1, keepdim=True))


def candidates_where_the_drafter_disagrees(monkeypatch):
    """A draft that is not its candidate is replaced by it: the choice looks at the draft."""

    def change(block, *_, **__):
        tokens, alive = candidates_of(block)
        return replace(block, tokens=torch.where(alive & (tokens >= 0), tokens, block.tokens))

    after(monkeypatch, Drafter, "propose", change)


def candidates_boosted_after_the_draw(monkeypatch):
    monkeypatch.setattr(walk_reference._Offers, "boosted", lambda offers, slot, logits: logits)
    after(monkeypatch, Drafter, "propose", lambda block, *_, **__: raised(block, *candidates_of(block)))


def chains_refreshed_between_draft_and_verification(monkeypatch):
    def change(block, *_, **__):
        tokens, alive = candidates_of(block)
        return raised(block, torch.where(tokens < 0, tokens, (tokens + 1) % V), alive)

    after(monkeypatch, Drafter, "propose", change)


def confidence_in_a_candidate_that_was_drawn(monkeypatch):
    """A slot's confidence knows whether its own draft goes on with the chain."""

    def sure(candidates, logits):
        slots = torch.arange(logits.shape[1])
        return torch.where(candidates.chains[:, 1:2] > slots, logits + 3.0, logits - 3.0)

    monkeypatch.setattr(Candidates, "sure", sure)


def tails_judged_as_drawn(monkeypatch):
    def change(block, *_):
        return replace(block, probs=torch.cat((block.probs, block.probs[:, -1:]), 1))

    after(monkeypatch, DraftBlock, "with_tail", change)


def last_draft_admitted_by_its_tail(monkeypatch):
    """A draft before the tail is the surer if it keeps the chain alive, as it says itself."""

    def change(block, *_):
        kept = (block.chains[:, 1:2] > 0) * 6.0 - 3.0
        return replace(block, confidence_logits=torch.cat((kept, block.confidence_logits[:, 1:]), 1))

    after(monkeypatch, DraftBlock, "with_tail", change)


ALL, ONE = PENALTIES["all"], {"schedule": "static", "verify_len": 1}
CHAINED = {"bounds": [COMPETING]}
REDUCED = toy_drafter(SWITCHES["reduced vocabulary, gated"])
TAILED = {"bounds": [COMPETING], "drafter": toy_drafter({"block_size": 1})}
LEAKS = [
    (tails_judged_as_drawn, STATIC | {"block_size": 2}, TAILED | {"length": 2}),
    (last_draft_admitted_by_its_tail, {"block_size": 2}, TAILED | {"requests": 2, "choose": half_of_all}),
    (candidates_where_the_drafter_disagrees, STATIC, CHAINED),
    (candidates_boosted_after_the_draw, STATIC, CHAINED),
    (chains_refreshed_between_draft_and_verification, STATIC, CHAINED),
    (confidence_in_a_candidate_that_was_drawn, {}, CHAINED | {"requests": 2, "choose": half_of}),
    (penalties_without_the_drafts, STATIC, {"length": 2, "adjustment": ALL}),
    (penalties_of_the_step_before, {"schedule": "off"}, {"length": 2, "adjustment": ALL}),
    (copies_weighed_by_the_drafters_distribution, STATIC, {"bounds": [COPYING], "drafter": REDUCED, "length": 2}),
    (drafts_judged_as_copies, ONE, {}),
    (copies_that_are_never_corrected, {"draft_free": True}, {"bounds": [COPYING]}),
    (distributions_at_another_temperature, STATIC, {}),
    (forced_by_value, {}, {"requests": 2, "choose": half_of}),
    (ranked_by_value, {}, {"requests": 2, "choose": half_of}),
    (budget_by_successor, {}, {"choose": one_of_a_block}),
    (bound_by_value, THRESHOLD, {}),
    (survival_by_value, {}, {"requests": 2, "choose": half_of}),
    (same_noise_in_every_round, ONE, {"length": 2}),
    (accept_with_the_drafts_noise, STATIC, {}),
    (one_number_for_all_requests, ONE, {"requests": 2}),
    (correction_with_the_noise_of_acceptance, STATIC, {}),
    (correction_from_the_target, STATIC, {}),
    (distribution_of_another_temperature, STATIC, {}),
    (rows_of_the_next_draft, STATIC, {}),
    (unverified_drafts_kept, {}, {"choose": one_of_a_block, "length": 2}),
]


def test_many_leaks_are_planted():
    assert len({leak.__name__ for leak, *_ in LEAKS}) == len(LEAKS) >= 15


@pytest.mark.thorough
@pytest.mark.parametrize(("leak", "options", "how"), LEAKS, ids=[leak.__name__ for leak, _, _ in LEAKS])
def test_a_leak_is_found(monkeypatch, leak, options, how):
    leak(monkeypatch)
    assert distribution_error(monkeypatch, options, **{"length": 1, **how}) > LEAK
