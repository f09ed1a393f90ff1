"""Candidates from the requests' own texts in the served stages: they are learned, and change no text."""

from dataclasses import replace

import pytest
import torch
from dspark_kernels import ASKED_ROWS, CACHED_ROWS, KIND_ROWS, USUAL, ChainRules, SecondTexts
from golden_server import CASES
from stage_loop import NO_CHAINS, StageLoop

from sglang_dspark.step.decision import StepDecision
from sglang_dspark.step.selection import FixedLength

PROMPTS = [case["prompt_ids"] for case in CASES[:2]]
TEXTS = [case["output_ids"] for case in CASES[:2]]
NUM_TOKENS = 40


def loop_of(*, chains):
    loop = StageLoop(schedule="static", lookup=True)
    loop.bounds = [USUAL if chains else NO_CHAINS]
    return loop


def test_boosts_and_confidences_rise_with_what_was_seen():
    """The golden target falls into loops: what the first requests have shown is there for the next ones."""
    loop = loop_of(chains=True)
    assert not loop.schedule.forecast.weights[0, :KIND_ROWS].any()
    for _ in range(2):
        assert loop.serve(PROMPTS, NUM_TOKENS) == [text[:NUM_TOKENS] for text in TEXTS]
    loop.schedule.forecast.update()
    boosts, least = loop.schedule.forecast.weights[:, :KIND_ROWS]
    assert (boosts[3:] > 1).any() and least[boosts > 1].isfinite().all()


def test_nothing_is_learned_of_requests_without_chains():
    loop = loop_of(chains=False)
    before = loop.schedule.forecast.weights
    loop.serve(PROMPTS, NUM_TOKENS)
    loop.schedule.forecast.update()
    assert torch.equal(loop.schedule.forecast.weights, before)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_seeded_text_is_the_same_whatever_competes_with_the_drafter(temperature):
    texts = [loop_of(chains=chains).serve(PROMPTS, 16, temperature, seeds=[3, 4]) for chains in (False, True)]
    assert texts[0] == texts[1]


def test_a_text_that_repeats_itself_is_copied_behind_the_drafters_block():
    loop = StageLoop(block_size=15, schedule="static", lookup=True)
    loop.bounds = [(*USUAL[:3], ASKED_ROWS)]
    for _ in range(2):
        assert loop.serve(PROMPTS, NUM_TOKENS) == [text[:NUM_TOKENS] for text in TEXTS]
    assert max(kept for trace in loop.traces for *_, kept in trace) > 7


@pytest.mark.parametrize("options", [{"schedule": "static"}, {"draft_free": True}], ids=["drafter", "draft-free"])
def test_ids_of_pictures_are_never_copied(options):
    """They are past every vocabulary, and the text behind them goes on with them where it repeats itself."""
    loop, prompt = StageLoop(**options, lookup=True), [7, 8, 9, 999, 999, 10, 7, 8, 9]
    loop.bounds = [(1, *USUAL[1:3], ASKED_ROWS)]
    loop.serve([prompt[:1]], 1)
    slots = loop._table[0].long()
    loop.drafter.remember(torch.tensor(prompt), slots[: len(prompt)])
    loop.texts = [prompt]
    block = loop.drafter.propose(loop._batch(2), 4, False, loop.schedule.forecast.weights)
    assert block.tokens.max() < 256 and block.chains[0, 1] == 0, "nothing is copied behind the end of a passage"


def test_rules_are_those_of_the_requests_that_are_drafted():
    """Each of three requests has rules of its own; the second and the third are drafted."""
    loop, behind = StageLoop(schedule="static", lookup=True), torch.tensor([[5, 6], [20, 22], [30, 31]])
    loop.serve([*PROMPTS, PROMPTS[0]], 2)
    loop.bounds = [NO_CHAINS, NO_CHAINS, (*NO_CHAINS[:2], 1, NO_CHAINS[3])]
    step, ends = replace(loop._batch(9), rows_of=loop._rows), torch.full((3, 1), -1)
    texts = torch.cat([ends, step.anchors[:, None], behind, ends], 1)
    needed = torch.tensor([[9, 1, 9, 9, 9]] * 3)
    rows = torch.tensor([ASKED_ROWS, CACHED_ROWS, ASKED_ROWS])  # of what competes, nothing is known yet
    parts = texts, needed, rows[:, None].expand_as(texts), torch.arange(3)[:, None].expand_as(texts)
    rules = ChainRules(step.rules.bounds, SecondTexts(*(part.flatten() for part in parts)))
    step, decision = replace(step, rules=rules), StepDecision(4, FixedLength())
    whole = loop.eager.draft(step, decision).block.tokens
    some = loop.eager.draft(step, replace(decision, draft_requests=(1, 2))).block.tokens
    assert whole[0, :2].tolist() == [5, 6] and whole[2, 0] == 30 and whole[2, 1] != 31
    assert torch.equal(some[1:], whole[1:]) and whole[1, 0] != 20
