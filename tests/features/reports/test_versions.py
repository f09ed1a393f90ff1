"""Accept length by version of the weights."""

from sglang_dspark.features.reports.counters import Counters
from sglang_dspark.features.reports.versions import MOST, Versions, report

GAMMA = 3


def step(counters, accepted):
    counters.record([GAMMA], [GAMMA], [accepted], policy="auto")


def test_rounds_count_for_the_version_in_force():
    """One that comes back goes on where it was; of many, the last ones are kept."""
    counters = Counters(GAMMA)
    step(counters, 3)  # before versions are told apart
    versions = Versions(counters, ("default", "a"))
    for key, accepted in ((None, 2), (("v1", "a"), 0), (("v1", "b"), 3), (("default", "a"), 1)):
        if key is not None:
            versions.change(key)
        step(counters, accepted)
    assert versions.counts() == [(("v1", "a"), (1, 1)), (("v1", "b"), (1, 4)), (("default", "a"), (2, 5))]
    for number in range(2 * MOST):
        versions.change((str(number), "a"))
    assert [key for key, _ in versions.counts()] == [(str(number), "a") for number in range(MOST, 2 * MOST)]


def test_versions_of_replicas_are_added_up():
    one, other = [(("v", "a"), (2, 5))], [[["v", "a"], [1, 1]], [["w", "a"], [0, 0]]]  # as JSON brings them
    assert report([one, other]) == [
        {"weight_version": "v", "drafter": "a", "rounds": 3, "accept_length": 2.0},
        {"weight_version": "w", "drafter": "a", "rounds": 0, "accept_length": None},
    ]
