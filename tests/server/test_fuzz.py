"""Some hundred odd requests, and a neighbour who notices nothing. ``benchmarks/fuzz.py`` sends thousands."""

from __future__ import annotations

from fuzzing.traffic import Neighbour, alone, send

REQUESTS = 300


def test_odd_requests_harm_nobody(dspark):
    quiet = alone(dspark.url, texts=2)
    with Neighbour(dspark.url) as neighbour:
        tally = send(dspark.url, REQUESTS, seed=1, users=4)
    dspark.post_json("/dspark/policy", {"policy": "auto"})
    assert tally.errors == {}
    assert tally.hangs == []
    assert sum(tally.answers.values()) == REQUESTS
    # All kinds were sent, and some of the requests were answered.
    assert len({name.rpartition(" ")[0] for name in tally.answers}) >= 15
    assert {name.rpartition(" ")[2] for name in tally.answers} >= {"200", "400", "left"}
    expected = quiet.texts[0]
    assert len(expected) == 64
    assert neighbour.texts
    assert all(text == expected for text in (*neighbour.texts, *alone(dspark.url, texts=1).texts))
