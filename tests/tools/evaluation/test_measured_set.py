"""The accept-length protocol on answers whose rounds are counted by hand."""

import numpy as np
import pytest

from sglang_dspark.errors import ConfigError
from sglang_dspark.tools.evaluation import Answer, MeasuredSet, recorded_blocks

GAMMA = 3
SURE, UNSURE = 3.0, -3.0


def measured_set(name, answers):
    return MeasuredSet.from_answers(name, answers, GAMMA)


def answer(accepted, *, stopped=False, num_tokens=None, confidence=None, verified=GAMMA):
    """An answer with these drafts accepted round by round; the first token comes from prefill."""
    trace = [None]
    for index, count in enumerate(accepted):
        logits = [SURE] * GAMMA if confidence is None else confidence[index]
        entry = {"start": 0, "anchor": 0, "draft": [7] * GAMMA, "confidence": logits, "verified": verified}
        trace += [entry | {"accepted": count}, *[None] * count]
    return Answer(trace, len(trace) if num_tokens is None else num_tokens, stopped)


def test_rounds_are_pooled_over_the_answers():
    measured = measured_set("set", [answer([3, 0]), answer([1])])
    assert measured.accept_length == pytest.approx((4 + 1 + 2) / 3)
    assert measured.survival == pytest.approx([2 / 3, 1 / 3, 1 / 3])
    assert measured.conditional == pytest.approx([2 / 3, 1 / 2, 1])
    assert measured.verify_rate == pytest.approx(7 / 12)
    assert (measured.num_answers, len(measured.accepted)) == (2, 3)


def test_an_accepted_stop_token_ends_the_round_without_a_bonus():
    # One token of prefill; of three accepted drafts the second is the stop token.
    measured = measured_set("set", [answer([3], stopped=True, num_tokens=3)])
    assert (measured.proposed.tolist(), measured.accepted.tolist(), measured.committed.tolist()) == ([2], [2], [2])
    assert measured.survival == [1, 1, 0]  # nobody proposed a third one


def test_a_stop_token_that_the_target_adds_is_a_bonus_token():
    measured = measured_set("set", [answer([1], stopped=True, num_tokens=3)])
    assert (measured.proposed.tolist(), measured.committed.tolist()) == ([GAMMA], [2])


def test_an_answer_that_is_cut_by_its_length_counts_its_last_round_in_full():
    measured = measured_set("set", [answer([3], num_tokens=2)])
    assert measured.accept_length == 4


@pytest.mark.parametrize(("num_answers", "share"), [(2, 0.5), (10, 0.3), (97, 0.25), (4, 0.9)])
def test_whole_answers_are_held_out_all_over_the_set(num_answers, share):
    measured = measured_set("set", [answer([0, 1, 2, 0, 1])] * num_answers)
    test = measured.held_out(share)
    fitted, held_out = set(measured.answer[~test]), set(measured.answer[test])
    assert not fitted & held_out
    assert len(held_out) == pytest.approx(share * num_answers, abs=1)
    assert len(held_out) < 10 or np.diff(sorted(held_out)).max() <= 1 / share + 1


def test_a_split_without_rounds_on_one_side():
    with pytest.raises(ConfigError, match=r"--held-out 0.3 of 2 prompts leaves no round in the held-out part"):
        measured_set("set", [answer([1])] * 2).held_out(0.3)
    with pytest.raises(ConfigError, match="in the fit part"):
        measured_set("set", [answer([]), answer([1])]).held_out(0.5)


def test_calibration_of_a_head_that_is_right_and_of_one_that_is_not():
    logit = float(np.log(0.75 / 0.25))
    answers = [answer([1 if n % 4 else 0], confidence=[[logit, UNSURE, UNSURE]]) for n in range(400)]
    first = measured_set("set", answers).confidence()[0]
    assert first["ece"] == pytest.approx(0.0, abs=1e-9)
    assert first["brier"] == pytest.approx(0.1875)
    assert (first["predicted_mean"], first["observed_mean"]) == pytest.approx((0.75, 0.75))
    wrong = measured_set("set", [answer([0], confidence=[[logit] * 3])]).confidence()[0]
    assert wrong["ece"] == pytest.approx(0.75)
    assert wrong["auc"] is None


def test_the_standard_error_is_that_of_repeated_samples():
    rng = np.random.default_rng(0)

    def sample():
        """Answers of different difficulty."""
        answers = [answer(rng.binomial(GAMMA, rng.choice([0.2, 0.8]), size=12).tolist()) for _ in range(50)]
        return measured_set("set", answers)

    sets = [sample() for _ in range(300)]
    spread = np.std([one.accept_length for one in sets])
    assert np.mean([one.standard_error for one in sets]) == pytest.approx(spread, rel=0.12)


def test_blocks_for_the_simulator_take_the_sets_in_turn_and_leave_out_what_stopped():
    easy = measured_set("easy", [answer([3, 3]), answer([3], stopped=True, num_tokens=2)])
    hard = measured_set("hard", [answer([0]), answer([1, 0])])
    blocks = recorded_blocks([easy, hard], "both")
    assert blocks.accepted.tolist() == [3, 3, 0, 1, 0]
    assert blocks.answer.tolist() == [0, 0, 1, 3, 3]
    assert blocks.logits.shape == (5, GAMMA)


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ([], "ended with its first token"),
        ([answer([])], "ended with its first token"),
        ([answer([1], verified=2)], "--speculative-dspark-schedule static"),
    ],
)
def test_rounds_that_say_nothing_about_the_drafter(answers, says):
    with pytest.raises(ConfigError, match=says):
        measured_set("set", answers)
