"""A few hundred odd requests beside a neighbour; `benchmarks/fuzz.py` sends ten thousand."""

from __future__ import annotations

from fuzzing.bodies import Bodies
from fuzzing.traffic import Neighbour, alone, send

REQUESTS = 500


def test_odd_requests_harm_nobody(dspark):
    """No HTTP 5xx, no answer that stays away or breaks off, and the neighbour reads what it always reads."""
    requests = Bodies(seed=1).some(REQUESTS)
    try:
        expected = alone(dspark.url, texts=1).texts[0]
        with Neighbour(dspark.url) as neighbour:
            tally = send(dspark.url, requests, users=4)
    finally:
        dspark.post_json("/dspark/policy", {"policy": "auto"})
    # What SGLang 0.5.23 answers, plain as well, where penalties leave a grammar no token of a finite score.
    errors = {kind: error for kind, error in tally.errors.items() if "Grammar accept_token failed" not in error[2]}
    assert (errors, tally.hangs, tally.broken, tally.ended) == ({}, [], [], False)
    assert sum(tally.answers.values()) == REQUESTS
    assert sum(count for name, count in tally.answers.items() if name.endswith(" 200")) > 50
    assert sum(count for name, count in tally.answers.items() if name.endswith(" 400")) > 200
    assert len(neighbour.texts) > 0
    assert all(text == expected for text in neighbour.texts)
