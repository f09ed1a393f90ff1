"""Comparison of the texts of configurations."""

from serving.agreement import Answer, compare, split_at

BASELINES = {"plain": "plain", "static": "plain"}


def answer(config, concurrency, text, *, slot=0, num_tokens=3):
    return Answer(config, concurrency, 0, slot, 10 + slot, num_tokens, text)


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


def test_baseline_is_compared_with_itself_at_the_lowest_concurrency():
    answers = [answer("plain", 4, "b"), answer("plain", 1, "a"), answer("static", 4, "b"), answer("static", 1, "a")]
    found = {(a.config, a.concurrency): (a.baseline_concurrency, a.identical) for a in compare(answers, BASELINES)}
    assert found == {("plain", 4): (1, 0), ("static", 4): (4, 1), ("static", 1): (1, 1)}


def test_equal_text_of_another_length_is_a_split():
    (agreement,) = compare([answer("plain", 1, "a"), answer("static", 1, "a", num_tokens=4)], BASELINES)
    assert agreement.identical == 0


def test_answers_without_partner_are_not_counted():
    assert compare([answer("plain", 1, "a"), answer("static", 1, "a", slot=1)], BASELINES) == []


def test_split_at_counts_shared_characters():
    assert [split_at("abc", "abd"), split_at("ab", "abc"), split_at("", "a")] == [2, 2, 0]
