"""Planted leaks: each uses what it must not know about a draft, or draws from a wrong distribution, and is found."""

from __future__ import annotations

from dataclasses import replace

import pytest
import stage_loop
import torch
from dspark_kernels import AdjustmentTable, Candidates, DraftBlock, DraftDistribution
from dspark_kernels.acceptance import acceptance_reference
from dspark_kernels.drafting import walk
from dspark_kernels.noise import Purpose, RoundKeys
from switches import SWITCHES
from target_distribution import (
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
from toy_pair import GAMMA, ToyLoop, V, toy_drafter

from sglang_dspark.scheduling.forecast import Forecast
from sglang_dspark.step import selection
from sglang_dspark.step.decision import StepDecision
from sglang_dspark.step.selection import TopK
from sglang_dspark.step.state import Confidence
from sglang_dspark.worker.drafter import Drafter

pytestmark = pytest.mark.slow

LEAK = 1e-4


def instead(owner, name, function):
    """Plant another function, which is given the served one."""
    served = getattr(owner, name)
    return lambda patch: patch.setattr(owner, name, lambda *args, **kwargs: function(served, *args, **kwargs))


def after(owner, name, change):
    """Let ``change`` turn the result of a served function, given its arguments, into another one."""
    return instead(owner, name, lambda served, *args, **kwargs: change(served(*args, **kwargs), *args, **kwargs))


def proposed(change):
    return after(Drafter, "propose", lambda block, *_, **__: change(block))


def both(*leaks):
    return lambda patch: [leak(patch) for leak in leaks]


def likes_a_token(order, rule, drafted, *_):
    """Survivals that know the drafts: token 0 is believed, others are not."""
    return torch.where(drafted.block.tokens[:, : order.shape[1]] == 0, 0.9, 0.05).cummin(1).values


def budget_by_successor(selected, decision, drafted):
    """The last draft's survival knows the first draft."""
    return replace(selected, budget=GAMMA if drafted.survival[0, 1] > 0.92 * drafted.survival[0, 0] else 0)


def with_scores(block, scores):
    """The block with the distribution of other scores."""
    return replace(block, distribution=DraftDistribution(scores, scores.logsumexp(-1), block.distribution.columns))


def of_another_temperature(block):
    """The drafter's distribution is reported otherwise than it was drawn from."""
    return with_scores(block, block.distribution.scores / 2)


def rows_of_the_next_draft(output, *_):
    output.logits_output.next_token_logits = output.logits_output.next_token_logits.roll(-1, 0)
    return output


DRAFTS = []


def survival_by_value(confidence, forecast, logits, bs, depth, *rest):
    return Confidence(logits, torch.where(DRAFTS[-1][:, :depth] == 0, 0.9, 0.1).cummin(1).values)


def of_the_first_row(served, logits, table, slots, requests, columns, *rest):
    """Every row of a window is adjusted as the first one."""
    served(logits, table, slots, requests, torch.zeros_like(columns), *rest)


def never_corrected(residual, target, draft, tokens, copied):
    """A rejected copy may come back as its own correction."""
    return target if draft is None or copied is not None else residual


def candidates_of(block):
    """Candidates [bs, gamma], and where their chains are alive."""
    slots = torch.arange(block.tokens.shape[1])
    return block.chains[:, 2:][:, : len(slots)], block.chains[:, 1:2] >= slots


def raised(block, tokens, alive):
    """The block with a distribution in which ``tokens`` have other odds."""
    there = torch.nn.functional.one_hot(tokens.clamp_min(0), V) * (alive & (tokens >= 0))[..., None]
    return with_scores(block, block.distribution.scores + 3.0 * there)


def candidates_instead(block):
    """A draft that is not its candidate is replaced by it: the choice looks at the draft."""
    tokens, alive = candidates_of(block)
    return replace(block, tokens=torch.where(alive & (tokens >= 0), tokens, block.tokens))


def refreshed(block):
    tokens, alive = candidates_of(block)
    return raised(block, torch.where(tokens < 0, tokens, (tokens + 1) % V), alive)


def sure_of_what_was_drawn(served, candidates, logits):
    """A slot's confidence knows whether its own draft goes on with the chain."""
    return torch.where(candidates.chains[:, 1:2] > torch.arange(logits.shape[1]), logits + 3.0, logits - 3.0)


def surer_before_a_tail(block, *_):
    """A draft before the tail is the surer if it keeps the chain alive, as it says itself."""
    kept = (block.chains[:, 1:2] > 0) * 6.0 - 3.0
    return replace(block, confidence_logits=torch.cat((kept, block.confidence_logits[:, 1:]), 1))


def weighed_by_a_draft(order, rule, drafted, *_):
    """A request counts less if its first draft is token 0."""
    return order * torch.where(drafted.block.tokens[:, :1] == 0, 0.2, 1.0)


ALL, ONE = PENALTIES["all"], {"schedule": "static", "verify_len": 1}
CHAINED, SHARED = {"bounds": [COMPETING]}, {"requests": 2, "choose": half_of}
REDUCED = toy_drafter(SWITCHES["reduced vocabulary, gated"])
TAILED = {"bounds": [COMPETING], "drafter": toy_drafter({"block_size": 1})}
LEAKS = {
    "tails_judged_as_drawn": (
        after(DraftBlock, "with_tail", lambda block, *_: with_scores(block, block.distribution.scores[:, [0, -1]])),
        *(STATIC | {"block_size": 2}, TAILED | {"length": 2}),
    ),
    "last_draft_admitted_by_its_tail": (
        after(DraftBlock, "with_tail", surer_before_a_tail),
        *({"block_size": 2}, TAILED | {"requests": 2, "choose": half_of_all}),
    ),
    "candidates_where_the_drafter_disagrees": (proposed(candidates_instead), STATIC, CHAINED),
    "candidates_boosted_after_the_draw": (
        both(
            instead(walk._Offers, "boosted", lambda served, offers, slot, logits: logits),
            proposed(lambda block: raised(block, *candidates_of(block))),
        ),
        *(STATIC, CHAINED),
    ),
    "chains_refreshed_between_draft_and_verification": (proposed(refreshed), STATIC, CHAINED),
    "confidence_in_a_candidate_that_was_drawn": (
        instead(Candidates, "sure", sure_of_what_was_drawn), {}, CHAINED | SHARED
    ),
    "penalties_without_the_drafts": (
        instead(stage_loop, "adjust", of_the_first_row), STATIC, {"length": 2, "adjustment": ALL}
    ),
    "penalties_of_the_step_before": (
        instead(AdjustmentTable, "count", lambda *_: None), {"schedule": "off"}, {"length": 2, "adjustment": ALL}
    ),
    "copies_weighed_by_the_drafters_distribution": (
        after(DraftBlock, "with_candidates", lambda block, *_: replace(block, copied=None)),
        *(STATIC, {"bounds": [COPYING], "drafter": REDUCED, "length": 2}),
    ),
    # Drawn drafts are kept as if nothing else could have been proposed, and corrected as what they are.
    "drafts_judged_as_copies": (
        both(
            proposed(lambda block: replace(block, copied=torch.ones_like(block.tokens) > 0)),
            after(acceptance_reference, "_residual", lambda _, target, draft, *rest: (target - draft).clamp_min(0.0)),
        ),
        *(ONE, {}),
    ),
    "copies_that_are_never_corrected": (
        after(acceptance_reference, "_residual", never_corrected), {"draft_free": True}, {"bounds": [COPYING]}
    ),
    "distributions_at_another_temperature": (
        instead(acceptance_reference, "target_probs", lambda served, logits, params: served(logits * 0.97, params)),
        *(STATIC, {}),
    ),
    # A request is verified whatever its survival where its draft is a certain token.
    "forced_by_value": (
        after(TopK, "_order", lambda o, _, d, *rest: torch.where(d.block.tokens[:, : o.shape[1]] == 1, 2.0, o)),
        *({}, SHARED),
    ),
    "ranked_by_value": (after(TopK, "_order", likes_a_token), {}, SHARED),
    "weighed_by_a_draft": (after(TopK, "_order", weighed_by_a_draft), {}, SHARED),
    "budget_by_successor": (after(StepDecision, "select", budget_by_successor), {}, {"choose": one_of_a_block}),
    "bound_by_value": (
        after(selection, "above_threshold", lambda _, confidence, threshold: GAMMA * (confidence[:, 1] > 0.92).long()),
        *(THRESHOLD, {}),
    ),
    "survival_by_value": (
        both(
            proposed(lambda block: DRAFTS.append(block.tokens) or block),
            after(Forecast, "predict", survival_by_value),
        ),
        *({}, SHARED),
    ),
    "same_noise_in_every_round": (
        instead(RoundKeys, "block_uniform", lambda served, keys, *args: served(replace(keys, step=0), *args)),
        *(ONE, {"length": 2}),
    ),
    "accept_with_the_drafts_noise": (
        instead(RoundKeys, "block_uniform", lambda served, keys, gamma, _: served(keys, gamma, Purpose.DRAFT)),
        *(STATIC, {}),
    ),
    "one_number_for_all_requests": (
        after(RoundKeys, "block_uniform", lambda uniforms, *_: uniforms[:1].expand_as(uniforms)), ONE, {"requests": 2}
    ),
    "correction_with_the_noise_of_acceptance": (
        instead(RoundKeys, "uniform", lambda served, keys, slots, _: served(keys, slots, Purpose.ACCEPT)), STATIC, {}
    ),
    "correction_from_the_target": (
        after(acceptance_reference, "_residual", lambda _, target, *rest: target), STATIC, {}
    ),
    "distribution_of_another_temperature": (proposed(of_another_temperature), STATIC, {}),
    "rows_of_the_next_draft": (after(ToyLoop, "verify", rows_of_the_next_draft), STATIC, {}),
    "unverified_drafts_kept": (
        instead(
            acceptance_reference,
            "_leading_run",
            lambda served, kept, lens: served(kept, torch.full_like(lens, kept.shape[1])),
        ),
        *({}, {"choose": one_of_a_block, "length": 2}),
    ),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize(("leak", "options", "how"), LEAKS.values(), ids=LEAKS)
def test_a_leak_is_found(monkeypatch, leak, options, how):
    leak(monkeypatch)
    assert distribution_error(monkeypatch, options, **{"length": 1, **how}) > LEAK
