"""The n-gram index against a search through the whole text."""

from hypothesis import given
from hypothesis import strategies as st

from sglang_dspark.proposals.ngram_lookup import NgramLookup

# Few different tokens, so that everything repeats.
texts = st.lists(st.integers(0, 3), max_size=40)


def by_search(text, min_ngram, max_ngram, most):
    """The definition, spelt out: longest suffix first, its last earlier occurrence, and what follows it."""
    for length in range(max_ngram, min_ngram - 1, -1):
        suffix = text[len(text) - length :]
        for start in range(len(text) - length - 1, -1, -1):
            if length <= len(text) and text[start : start + length] == suffix:
                longer = list(text)
                for place in range(start + length, start + length + most):
                    longer.append(longer[place])
                return longer[len(text) :]
    return []


@given(texts, st.lists(texts, max_size=4), st.integers(1, 4), st.integers(0, 3), st.integers(0, 9))
def test_proposals_are_those_of_a_search(prompt, steps, min_ngram, more, most):
    lookup = NgramLookup(prompt, min_ngram, min_ngram + more)
    text = list(prompt)
    assert lookup.propose(most) == by_search(text, min_ngram, min_ngram + more, most)
    for tokens in steps:
        lookup.extend(tokens)
        text += tokens
        assert lookup.propose(most) == by_search(text, min_ngram, min_ngram + more, most)


def test_the_most_recent_match_of_the_longest_suffix_wins():
    text = [1, 2, 3, 10, 9, 2, 3, 20, 9, 1, 2, 3]
    assert NgramLookup(text, 2, 3).propose(2) == [10, 9]
    assert NgramLookup(text, 2, 2).propose(2) == [20, 9]
    assert NgramLookup(text, 4, 5).propose(2) == []


def test_a_period_goes_on():
    assert NgramLookup([5, 1, 2, 1, 2], 2, 2).propose(5) == [1, 2, 1, 2, 1]
    assert NgramLookup([7, 7, 7, 7], 3, 5).propose(3) == [7, 7, 7]
