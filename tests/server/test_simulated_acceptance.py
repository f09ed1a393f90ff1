"""A server of random weights that accepts by chance. Without a server: tests/worker/test_graph_executors.py."""

from __future__ import annotations

from itertools import pairwise

import pytest
from golden_server import generate, policy

from sglang_dspark.tools.launch import LaunchedServer

pytestmark = pytest.mark.thorough
PROFILE = (1.0, 0.5, 0.75, 0.0, 0.0, 0.0, 0.0)


def accepted_by(server: LaunchedServer, temperature: float, max_new_tokens: int) -> list[list[int]]:
    """Drafts accepted in the rounds of two requests at a time, whose answers are checked to be made of them."""
    parameters = {"temperature": temperature, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    body = {"input_ids": [5, 6, 7], "sampling_params": parameters, "speculation": {"trace": True}}
    accepted = []
    for answer in generate(server, [body] * 2, 2):
        ids, trace = answer["output_ids"], answer["meta_info"]["dspark_trace"]
        assert len(ids) == max_new_tokens
        accepted.append([])
        starts = [place for place, entry in enumerate(trace) if entry is not None]
        # The last round may run past the tokens that were asked for.
        for start, end in pairwise(starts):
            entry = trace[start]
            assert end - start == entry["accepted"] + 1
            assert ids[start : end - 1] == entry["draft"][: entry["accepted"]]
            accepted[-1].append(entry["accepted"])
    return accepted


def test_drafts_are_accepted_by_the_profile(simulated):
    """Kept as often as they should be: ``tests/kernels/test_simulation.py``."""
    with policy(simulated, "static"):
        accepted = accepted_by(simulated, temperature=0, max_new_tokens=40)
    assert {count for counts in accepted for count in counts} <= {1, 2, 3}
    # Every round has noise of its own.
    assert any(len(set(counts)) > 1 for counts in accepted)


def test_nothing_is_accepted_that_was_not_verified(simulated):
    """The same for sampled requests."""
    with policy(simulated, "static", verify_len=1):
        accepted = accepted_by(simulated, temperature=1, max_new_tokens=7)
    assert {count for counts in accepted for count in counts} == {1}


def test_simulated_acceptance_is_announced(simulated):
    assert simulated.get_json("/dspark/capabilities")["simulated_acceptance"] == [*PROFILE]
    log = simulated.log_path.read_text()
    assert "acceptance is simulated" in log
    assert "with random weights" in log
