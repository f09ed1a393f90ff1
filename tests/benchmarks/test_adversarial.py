"""`auto` is never far behind the best fixed length, whatever texts, heads and step times it meets."""

import pytest
from misled import CASES, ratio

HARDEST = [
    "head much too careful, 500 steps",
    "inverted head",
    "all rejected, 1500 steps",
    "plain steps 3 times too slow in the table, 1 users, acceptance 0.05",
    "plain steps 3 times too slow in the table, 8 users, acceptance 0.05",
]


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["GPU", "costly tokens"])
@pytest.mark.parametrize("case", HARDEST)
def test_auto_brings_nine_tenths_of_the_best_fixed_length(case, machine):
    assert ratio(machine, CASES[case], seed=0) > 0.9
