"""A request that new weights have reached is told what came of its drafts with each version."""

from sglang_objects import request

from sglang_dspark.calibration.fit import Verdict
from sglang_dspark.features.reports.spans import KEY, Spans


def go_on(req, rounds, accepted):
    req.spec_verify_ct += rounds
    req.spec_num_correct_drafts += accepted
    req.output_ids.extend([7] * (rounds + accepted))


def told(req):
    """Return the entries of a request, by token, those that are not null."""
    entries = (req.customized_info or {}).get(KEY, [])
    return {token: [tuple(span.values()) for span in entry] for token, entry in enumerate(entries) if entry is not None}


def test_each_version_has_its_own_counts():
    spans, req, other, new = Spans(), request(), request(), request()
    spans.begin([req, other])
    go_on(req, 2, 4)
    spans.end("1", Verdict.FITS)
    spans.end("2", Verdict.UNKNOWN)  # no step was taken with it
    go_on(req, 3, 0)
    spans.begin([new])
    go_on(new, 1, 1)
    first, second = ("1", "fits", 2, 4, 3.0), ("3", "unknown", 3, 0, 1.0)
    assert told(req) == {6: [first]}
    for one in (req, other, new):
        spans.end_request(one, "3", Verdict.UNKNOWN)
    assert told(req) == {6: [first], 8: [first, second]}
    assert told(other) == told(new) == {}


def test_an_entry_lies_at_a_token_of_the_answer():
    spans, req = Spans(), request()
    spans.begin([req])
    go_on(req, 1, 2)
    spans.end("1", Verdict.FITS)
    spans.end_request(req, "2", Verdict.UNKNOWN)  # aborted meanwhile
    assert told(req) == {2: [("1", "fits", 1, 2, 3.0)]}


def test_answers_tell_of_a_drafter_that_does_not_fit():
    spans, req = Spans(), request()
    spans.begin([req])
    go_on(req, 4, 0)
    spans.end_request(req, "7", Verdict.MISFIT)
    assert told(req) == {3: [("7", "misfit", 4, 0, 1.0)]}
