"""Greedy acceptance and the one-request decoding loop, with a scripted target."""

import pytest
import torch
from reference_decoding import accept_greedy, decode_greedy

from sglang_dspark.draft.weights import load_draft_model

VOCAB = 19


def one_hot(tokens):
    return torch.eye(VOCAB)[list(tokens)]


@pytest.mark.parametrize(
    ("draft", "choices", "expected"),
    [
        ([4, 5, 6], [4, 5, 6, 7], (3, 7)),
        ([4, 5, 6], [4, 5, 8, 7], (2, 8)),
        ([4, 5, 6], [9, 5, 6, 7], (0, 9)),
        ([4, 5, 6], [4, 9, 6, 7], (1, 9)),
        ([], [3], (0, 3)),
        ([4, 2, 6], [4, 2, 6, 7], (2, None)),  # 2 stops: what follows is not accepted, and nothing is drawn
        ([4, 5, 2], [4, 5, 2, 7], (3, None)),
        ([4, 2, 6], [5, 2, 6, 7], (0, 5)),  # a rejected stop token stops nothing
        ([4, 5, 6], [4, 2, 6, 7], (1, 2)),
    ],
)
def test_the_longest_matching_prefix_is_accepted(draft, choices, expected):
    assert accept_greedy(one_hot(choices), draft, stop_token_ids=[2]) == expected


@pytest.fixture
def model(make_checkpoint):
    return load_draft_model(make_checkpoint(), dtype=torch.float32, device="cpu")


def scripted(script, prompt_len):
    """A target whose greedy continuation is ``script`` while the ids follow it; features are random but causal."""
    features = torch.randn(200, 72)
    seen = []

    def target(ids):
        seen.append(list(ids))
        choices = [0] * (prompt_len - 1) + script[: len(ids) - prompt_len + 1]
        return one_hot(choices), features[: len(ids)]

    return target, seen


def test_the_output_is_the_targets_whatever_is_drafted(model):
    script = torch.randint(19, (60,)).tolist()
    target, seen = scripted(script, prompt_len=5)
    decoded = decode_greedy(model, target, [1, 2, 3, 4, 5], max_new_tokens=20)
    assert decoded.output_ids == script[:20]
    assert seen[0] == [1, 2, 3, 4, 5]
    position = 5
    for round_, ids in zip(decoded.rounds, seen[1:], strict=True):
        assert (round_.start, round_.anchor) == (position, script[position - 5])
        assert ids == [1, 2, 3, 4, 5, *script[: position - 4], *round_.block.tokens]
        position += round_.accepted + 1
    assert position >= 25 > decoded.rounds[-1].start
    assert decoded.accept_length == pytest.approx(sum(r.accepted + 1 for r in decoded.rounds) / len(decoded.rounds))


def test_a_target_that_agrees_accepts_whole_blocks(model):
    """The target repeats the draft of each round, so every round commits gamma drafts and a bonus token."""
    features = torch.randn(200, 72)

    def target(ids):
        return one_hot([*ids[1:], 7]), features[: len(ids)]

    decoded = decode_greedy(model, target, [1, 2, 3], max_new_tokens=17)
    assert [r.accepted for r in decoded.rounds] == [5, 5, 5]
    assert [r.start for r in decoded.rounds] == [3, 9, 15]
    assert decoded.accept_length == 6.0
    assert len(decoded.output_ids) == 17


def test_decoding_ends_at_a_stop_token_from_target_or_draft(model):
    target, _ = scripted([9, 8, 2, 7, 7, 7, 7, 7, 7, 7, 7, 7], prompt_len=2)
    decoded = decode_greedy(model, target, [1, 1], max_new_tokens=10, stop_token_ids=[2])
    assert decoded.output_ids == [9, 8, 2]

    features = torch.randn(50, 72)

    def agreeing(ids):
        return one_hot([*ids[1:], 7]), features[: len(ids)]

    free = decode_greedy(model, agreeing, [1, 1], max_new_tokens=10)
    first_block = free.rounds[0].block.tokens
    stop = next(token for token in first_block if token != 7)
    stopped = decode_greedy(model, agreeing, [1, 1], max_new_tokens=10, stop_token_ids=[stop])
    end = first_block.index(stop) + 1
    assert stopped.output_ids == [7, *first_block[:end]]
    assert [r.accepted for r in stopped.rounds] == [end]
    assert stopped.accept_length == end  # no bonus token was drawn


def test_a_stop_token_straight_after_the_prompt_leaves_no_rounds(model):
    target, _ = scripted([2], prompt_len=2)
    decoded = decode_greedy(model, target, [1, 1], max_new_tokens=10, stop_token_ids=[2])
    assert decoded.output_ids == [2] and decoded.rounds == []
    assert decoded.accept_length != decoded.accept_length  # nan
