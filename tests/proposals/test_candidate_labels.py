"""Labels recognised by their beginnings."""

from hypothesis import given
from hypothesis import strategies as st

from sglang_dspark.proposals.candidate_labels import CandidateLabels, LabelTrie, spellings

tokens = st.integers(0, 3)
label_lists = st.lists(st.lists(tokens, max_size=5).map(tuple), max_size=4)


@given(label_lists, st.lists(st.lists(tokens, max_size=4), max_size=5), st.integers(0, 6))
def test_proposals_complete_the_longest_beginning_at_the_end(labels, steps, most):
    watched = CandidateLabels(LabelTrie(labels))
    output = []
    for step in steps:
        watched.extend(step)
        output += step
        begun = [
            (length, label)
            for length in range(len(output), 0, -1)
            for label in labels
            if length < len(label) and tuple(output[-length:]) == label[:length]
        ]
        assert watched.propose(most) == (list(begun[0][1][begun[0][0] :][:most]) if begun else [])


def test_nothing_is_proposed_before_the_first_token_or_after_the_last():
    watched = CandidateLabels(LabelTrie([(1, 2, 3), (1, 4, 5)]))
    assert watched.propose(9) == []
    watched.extend([1])
    assert watched.propose(9) == [2, 3]
    watched.extend([4])
    assert watched.propose(9) == [5]
    watched.extend([5])
    assert watched.propose(9) == []


def test_labels_are_spelt_with_and_without_a_space_before_them():
    assert spellings("ab") == ["ab", " ab"]
    assert spellings(" a") == [" a"]


@given(st.integers(2, 40), st.integers(1, 400))
def test_a_text_costs_the_same_per_token_whatever_the_labels_are(length, output):
    """A text of one token that is a label of one token, many times: every position in it begins the label."""
    trie, follows = LabelTrie([(0,) * length]), 0

    class Counted(dict):
        def get(self, key):
            nonlocal follows
            follows += 1
            return super().get(key)

    trie._longer = Counted(trie._longer)
    watched = CandidateLabels(trie)
    watched.extend([0] * output + [1])
    assert follows <= 2 * (output + 1)
