"""Checkpoints of every kind in the served stages: the drafts are those of the slow reference decoder."""

import pytest
from golden_server import CASES
from random_drafter import VARIANTS, random_drafter
from reference_decoding import decode_greedy
from stage_loop import StageLoop

NUM_TOKENS = 8


@pytest.mark.parametrize("variant", VARIANTS)
def test_drafts_equal_the_reference(variant, tmp_path):
    folder = random_drafter(tmp_path, variant)
    loop = StageLoop(draft=folder, schedule="static")
    prompt = CASES[1]["prompt_ids"]
    expected = decode_greedy(loop.drafter.model, loop.target, prompt, max_new_tokens=NUM_TOKENS, stop_token_ids=[])
    assert loop.serve([prompt], NUM_TOKENS) == [expected.output_ids]
    # The reference goes on until its context is full, the loop until it has its tokens.
    rounds = [(r.start, r.block.tokens, r.accepted) for r in expected.rounds]
    served = [(start, drafts, accepted) for start, _, drafts, accepted in loop.traces[0]]
    assert len(served) > 3
    assert served[:-1] == rounds[: len(served) - 1]
    assert len({tuple(drafts) for _, drafts, _ in served}) > 1
