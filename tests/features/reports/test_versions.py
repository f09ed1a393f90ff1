"""Accept length by version of the weights."""

import torch

from sglang_dspark.features.reports.first_drafts import FirstDrafts
from sglang_dspark.features.reports.versions import MOST, Versions, report
from sglang_dspark.step.decision import StepDecision
from sglang_dspark.step.record import StepRecord
from sglang_dspark.step.selection import FixedLength

STEP = StepRecord(["a", "b"], StepDecision(3, FixedLength()), [3, 3], torch.tensor([3, 3]), None, None)


def in_short(versions):
    return [(count["key"], count["rounds"], count["tokens"]) for count in versions.counts]


def test_rounds_count_for_the_version_in_force():
    """One that comes back goes on where it was; of many, the last ones are kept."""
    versions = Versions(("default", "a"))
    for key, accepted in ((None, 2), (("v1", "a"), 0), (("v1", "b"), 3), (("default", "a"), 1)):
        if key is not None:
            versions.change(key)
        versions.count(STEP, [1], [accepted])
    assert in_short(versions) == [(("v1", "a"), 1, 1), (("v1", "b"), 1, 4), (("default", "a"), 2, 5)]
    for number in range(2 * MOST):
        versions.change((str(number), "a"))
    assert [key for key, *_ in in_short(versions)] == [(str(number), "a") for number in range(MOST, 2 * MOST)]


def test_a_drafter_is_judged_anew_with_each_version():
    versions = Versions(("1", "a"))
    versions.first_drafts.counts |= {"verified": 80, "accepted": 0}
    versions.change(("2", "a"))
    versions.first_drafts.counts |= {"verified": 80, "accepted": 70}
    assert [one["drafter_fit"] for one in report([versions.counts])] == ["misfit", "fits"]
    versions.change(("2", "a"))  # under the same name
    assert [one["drafter_fit"] for one in report([versions.counts])] == ["misfit", "unknown"]


def test_versions_of_replicas_are_added_up():
    def counts(version, rounds, tokens, verified=0):
        first = FirstDrafts().counts | {"verified": verified}
        return {"key": [version, "a"], "rounds": rounds, "tokens": tokens, "first_drafts": first}

    found = report([[counts("v", 2, 5, 40)], [counts("v", 1, 1, 40), counts("w", 0, 0)]])
    assert found == [
        {"weight_version": "v", "drafter": "a", "rounds": 3, "accept_length": 2.0, "drafter_fit": "misfit"},
        {"weight_version": "w", "drafter": "a", "rounds": 0, "accept_length": None, "drafter_fit": "unknown"},
    ]
