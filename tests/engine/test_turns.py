"""Replicas take turns: none begins before all are there, and they follow each other by number."""

import time
from threading import Thread

from sglang_dspark.engine.measure_steps import turn

REPLICAS = 3


def test_replicas_follow_each_other_when_all_are_there(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    told = []

    def start(replica):
        time.sleep(0.1 * replica)
        told.append(("here", replica))
        with turn("a start", replica, REPLICAS):
            told.append(("begins", replica))
            time.sleep(0.05)
            told.append(("ends", replica))

    threads = [Thread(target=start, args=(replica,)) for replica in range(REPLICAS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert {what for what, _ in told[:REPLICAS]} == {"here"}
    assert told[REPLICAS:] == [(what, replica) for replica in range(REPLICAS) for what in ("begins", "ends")]
    assert list(tmp_path.iterdir()) == []  # the last one takes the file away
