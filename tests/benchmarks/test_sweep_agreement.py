"""Comparison of the texts of configurations."""

from serving.agreement import Answer, compare, split_at
from serving.load import Load

BASELINES = {"plain": "plain", "static": "plain"}


def answer(config, users, text, *, slot=0, num_tokens=3, round=0, prompt_index=None):
    return Answer(
        config, Load(users), round, slot, 10 + slot if prompt_index is None else prompt_index, num_tokens, text
    )


def test_shares_and_splits():
    answers = [
        *(answer("plain", 1, "the same"), answer("plain", 1, "a cat sat", slot=1)),
        *(answer("static", 1, "the same"), answer("static", 1, "a car ran", slot=1)),
    ]
    (agreement,) = compare(answers, BASELINES)
    assert (agreement.config, agreement.baseline, agreement.compared, agreement.identical) == ("static", "plain", 2, 1)
    assert agreement.share == 0.5
    (split,) = agreement.splits
    assert (split.prompt_index, split.at, split.expected, split.found) == (11, 4, "a cat sat", "a car ran")


def test_texts_at_two_loads_are_compared_by_prompt():
    # More users ask more prompts per round, so the same slot of round 1 has another prompt.
    few = [answer("plain", 1, f"text {n}", prompt_index=n, round=n // 2, slot=n % 2) for n in range(4)]
    many = [answer("plain", 4, f"text {n}", prompt_index=n, round=n // 4, slot=n % 4) for n in range(8)]
    (agreement,) = compare([*few, *many], BASELINES)
    assert (agreement.compared, agreement.identical) == (4, 4)


def test_a_prompt_that_comes_again_is_compared_every_time():
    expected = [answer("plain", 1, "a", round=index, prompt_index=5) for index in range(3)]
    found = [answer("static", 1, "ab"[index == 2], round=index, prompt_index=5) for index in range(3)]
    (agreement,) = compare([*expected, *found], BASELINES)
    assert (agreement.compared, agreement.identical, agreement.splits[0].round) == (3, 2, 2)


def test_baseline_is_compared_with_itself_at_the_first_load():
    answers = [answer("plain", 1, "a"), answer("plain", 4, "b"), answer("static", 4, "b"), answer("static", 1, "a")]
    found = {
        (a.config, a.load.concurrency): (a.baseline_load.concurrency, a.identical) for a in compare(answers, BASELINES)
    }
    assert found == {("plain", 4): (1, 0), ("static", 4): (4, 1), ("static", 1): (1, 1)}


def test_equal_text_of_another_length_is_a_split():
    (agreement,) = compare([answer("plain", 1, "a"), answer("static", 1, "a", num_tokens=4)], BASELINES)
    assert agreement.identical == 0


def test_answers_without_partner_are_not_counted():
    assert compare([answer("plain", 1, "a"), answer("static", 1, "a", slot=1)], BASELINES) == []


def test_split_at_counts_shared_characters():
    assert [split_at("abc", "abd"), split_at("ab", "abc"), split_at("", "a")] == [2, 2, 0]
