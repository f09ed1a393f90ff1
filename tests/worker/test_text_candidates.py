"""Candidates from the requests' own texts in the served stages: they are learned, and change no text."""

import pytest
import torch
from dspark_kernels import ASKED_ROWS, KIND_ROWS, USUAL
from golden_server import CASES
from stage_loop import NO_CHAINS, StageLoop

PROMPTS = [case["prompt_ids"] for case in CASES[:2]]
TEXTS = [case["output_ids"] for case in CASES[:2]]
NUM_TOKENS = 40


def loop_of(*, chains):
    loop = StageLoop(schedule="static")
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
    loop = StageLoop(block_size=15, schedule="static")
    loop.bounds = [(*USUAL[:3], ASKED_ROWS)]
    for _ in range(2):
        assert loop.serve(PROMPTS, NUM_TOKENS) == [text[:NUM_TOKENS] for text in TEXTS]
    assert max(kept for trace in loop.traces for *_, kept in trace) > 7
