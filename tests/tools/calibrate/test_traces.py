"""Rounds out of traces, and their split by prompt."""

import numpy as np
import pytest

from sglang_dspark.errors import ConfigError
from sglang_dspark.tools.calibrate.traces import BlockRounds


def entry(verified=2, accepted=1, confidence=(0.5, -1.5), num_drafts=2):
    drafts = list(range(num_drafts))
    entry = {"start": 9, "anchor": 1, "draft": drafts, "verified": verified, "accepted": accepted}
    return entry if confidence is None else {**entry, "confidence": list(confidence)}


def test_only_rounds_that_verified_the_whole_block_count():
    traces = [
        [None, entry(accepted=0), entry(verified=1), None, entry(accepted=2), None, None],
        [],
        [None, entry(0, 0, (), num_drafts=0), entry(1, 1, (0.0,), num_drafts=1), entry(confidence=(3.0, 4.0))],
    ]
    rounds = BlockRounds.from_traces(traces, gamma=2)
    assert rounds.logits.tolist() == [[0.5, -1.5], [0.5, -1.5], [3.0, 4.0]]
    assert rounds.accepted.tolist() == [0, 2, 1]
    assert rounds.prompt.tolist() == [0, 0, 2]


@pytest.mark.parametrize(
    ("traces", "says"),
    [
        ([[entry(verified=1)]], "none of 1 rounds verified its whole block of drafts; .* static"),
        ([[entry(1, 1, (0.5,), num_drafts=1)]], "none of 1 rounds verified its whole block"),
        ([[None], []], "none of 0 rounds"),
        ([[entry(confidence=None)]], 'no "confidence": the drafter has no confidence head'),
        ([[entry(confidence=(1.0,))]], "1 confidences for 2 drafts"),
    ],
)
def test_traces_that_cannot_be_used(traces, says):
    with pytest.raises(ConfigError, match=says):
        BlockRounds.from_traces(traces, gamma=2)


@pytest.mark.parametrize(("num_prompts", "held_out"), [(2, 0.5), (10, 0.3), (97, 0.25), (4, 0.9)])
def test_the_split_is_by_prompt_and_of_the_share(num_prompts, held_out):
    rounds = BlockRounds.from_traces([[entry(accepted=n % 3) for n in range(5)]] * num_prompts, gamma=2)
    fit, test = rounds.split(num_prompts, held_out)
    assert not set(fit.prompt) & set(test.prompt)
    assert len(fit.accepted) + len(test.accepted) == len(rounds.accepted)
    assert len(set(test.prompt)) == pytest.approx(held_out * num_prompts, abs=1)
    # spread over the file
    assert len(test.prompt) < 50 or np.diff(sorted(set(test.prompt))).max() <= 1 / held_out + 1


def test_a_split_without_rounds_on_one_side():
    rounds = BlockRounds.from_traces([[entry()], [entry()]], gamma=2)
    with pytest.raises(ConfigError, match=r"--held-out 0.3 of 2 prompts leaves no round in the held-out part"):
        rounds.split(2, 0.3)
    with pytest.raises(ConfigError, match="in the fit part"):
        BlockRounds.from_traces([[], [entry()]], gamma=2).split(2, 0.5)
