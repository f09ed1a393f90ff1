"""The rows that stand for a product of values have every two of them."""

import itertools

import pytest
from pairwise import pairwise


@pytest.mark.parametrize("axes", [("abc", "xy"), ("abcd", "xyz", "12"), ("ab", "cd", "ef", "gh", "ij"), ("a", "bc")])
def test_every_two_values_meet(axes):
    found = pairwise(*axes)
    for (i, first), (j, second) in itertools.combinations(enumerate(axes), 2):
        assert {(row[i], row[j]) for row in found} == set(itertools.product(first, second))


def test_pairs_are_few():
    assert len(pairwise("abcd", "xyz", "12")) == 12
    assert len(pairwise("ab", "cd", "ef", "gh", "ij")) <= 8
