"""The drafts of a request, counted by SGLang step by step, in the meta_info of its answer."""

from types import SimpleNamespace

from sglang_dspark.features.reports.acceptance import NOTED
from sglang_dspark.features.reports.request_counts import report


def outputs(*, rounds, drafted, rows, accepted):
    """Return a batch whose second request has these counts; the ``rows`` of its verifications include the anchors."""
    return SimpleNamespace(
        rids=["another", "asked"],
        spec_verify_ct=[9, rounds],
        spec_num_block_accept_tokens=[9, drafted],
        spec_num_cap_tokens=[9, rows],
        spec_num_correct_drafts=[9, accepted],
    )


def meta_info(*, rounds, drafted, rows, accepted, **of_sglang):
    """Return the report of such a request, which keeps it."""
    found, request = dict(of_sglang), SimpleNamespace()
    manager = SimpleNamespace(rid_to_state={"asked": SimpleNamespace(obj=request)})
    report(None, manager, found, outputs(rounds=rounds, drafted=drafted, rows=rows, accepted=accepted), 1)
    assert getattr(request, NOTED, {}) == found
    return found


def test_the_drafts_that_were_verified_count():
    of_sglang = {"spec_accept_rate": 0.1, "spec_num_proposed_drafts": 28}
    found = meta_info(rounds=4, drafted=20, rows=12, accepted=6, **of_sglang)
    assert found["dspark"] == {
        "rounds": 4,
        "drafted_tokens": 20,
        "verified_tokens": 8,
        "accepted_tokens": 6,
        "accept_length": 2.5,
    }
    assert (found["spec_accept_rate"], found["spec_num_proposed_drafts"]) == (0.75, 8)


def test_plain_steps_are_reported_and_verify_nothing():
    found = meta_info(rounds=4, drafted=0, rows=4, accepted=0, spec_accept_rate=0.0)
    assert (found["dspark"]["verified_tokens"], found["spec_accept_rate"]) == (0, 0.0)


def test_a_request_without_a_step_says_nothing():
    assert meta_info(rounds=0, drafted=0, rows=0, accepted=0) == {}
    embeddings = {}
    report(None, None, embeddings, SimpleNamespace(), 0)
    assert embeddings == {}
