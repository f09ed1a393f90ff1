"""The n-gram index against a search through the whole text."""

from hypothesis import given
from hypothesis import strategies as st

from sglang_dspark.proposals import ngram_lookup
from sglang_dspark.proposals.ngram_lookup import NgramLookup, Prompt, as_bytes

# Few different tokens, so that everything repeats.
texts = st.lists(st.integers(0, 3), max_size=40)


EVERYTHING = 10_000  # more n-grams than any text here has


VOCAB_SIZE = 1000


def lookup_in(prompt, min_ngram, max_ngram):
    return NgramLookup(Prompt(as_bytes(prompt, VOCAB_SIZE), min_ngram, max_ngram))


def proposal(lookup, most):
    lookup.prepare(EVERYTHING)
    return lookup.propose(most)


def by_search(text, min_ngram, max_ngram, most):
    """The definition, spelt out: longest suffix first, its last earlier occurrence, and what follows it."""
    for length in range(max_ngram, min_ngram - 1, -1):
        suffix = text[len(text) - length :]
        for start in range(len(text) - length - 1, -1, -1):
            if length <= len(text) and text[start : start + length] == suffix:
                longer = list(text)
                for position in range(start + length, start + length + most):
                    longer.append(longer[position])
                return longer[len(text) :]
    return []


@given(texts, st.lists(texts, max_size=4), st.integers(1, 4), st.integers(0, 3), st.integers(0, 9))
def test_proposals_are_those_of_a_search(prompt, steps, min_ngram, more, most):
    lookup = lookup_in(prompt, min_ngram, min_ngram + more)
    text = list(prompt)
    assert proposal(lookup, most) == by_search(text, min_ngram, min_ngram + more, most)
    for tokens in steps:
        lookup.extend(tokens)
        text += tokens
        assert proposal(lookup, most) == by_search(text, min_ngram, min_ngram + more, most)


def test_the_most_recent_match_of_the_longest_suffix_wins():
    text = [1, 2, 3, 10, 9, 2, 3, 20, 9, 1, 2, 3]
    assert proposal(lookup_in(text, 2, 3), 2) == [10, 9]
    assert proposal(lookup_in(text, 2, 2), 2) == [20, 9]
    assert proposal(lookup_in(text, 4, 5), 2) == []


def test_a_period_goes_on():
    assert proposal(lookup_in([5, 1, 2, 1, 2], 2, 2), 5) == [1, 2, 1, 2, 1]
    assert proposal(lookup_in([7, 7, 7, 7], 3, 5), 3) == [7, 7, 7]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=200), st.integers(1, 30), st.integers(0, 9))
def test_a_prompt_is_indexed_in_bounded_steps(prompt, most, drafts):
    lookup = lookup_in(prompt, 1, 3)
    steps = 0
    while done := lookup.prepare(most):
        steps += 1
        assert done <= most
    assert lookup.propose(drafts) == by_search(prompt, 1, 3, drafts) or most < 3
    assert steps <= len(prompt) // max(1, most // 3) + 1


def test_the_last_match_counts_in_whichever_dictionary_it_is(monkeypatch):
    monkeypatch.setattr(ngram_lookup, "_SEGMENT", 2)
    lookup = lookup_in([1, 2, 8, 4, 5, 1, 2, 9, 1, 2], 2, 2)
    while lookup.prepare(2):
        pass
    assert lookup.propose(1) == [9]


def test_samples_of_a_prompt_share_its_index_and_not_their_outputs():
    prompt = Prompt(as_bytes([5, 6, 7, 8, 5, 6], VOCAB_SIZE), 2, 2)
    first, second = NgramLookup(prompt), NgramLookup(prompt)
    assert first.prepare(EVERYTHING) > 0
    assert second.prepare(EVERYTHING) == 0
    first.extend([9, 5, 6])
    first.prepare(EVERYTHING)
    assert first.propose(2) == [9, 5]
    assert second.propose(2) == [7, 8]


def test_copies_end_before_a_picture():
    """Whose ids have 62 bits; two pictures are alike here."""
    picture = VOCAB_SIZE + 2**61 + 3
    lookup = lookup_in([7, 8, 9, picture, picture, 5, 6, 7, 8], 2, 3)
    lookup.prepare(1000)
    assert lookup.propose(4) == [9]
    lookup.extend([9])
    assert lookup.propose(4) == []
