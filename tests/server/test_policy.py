"""The policy of a running server, and what the statistics say about it."""

from __future__ import annotations

import urllib.error

import pytest
import torch
from golden_server import greedy, output_ids, policy

PROMPTS = [[5 + i, 9, 20 + i, 7] for i in range(16)]


def test_auto_is_the_default_and_reports_what_it_knows(dspark):
    output_ids(dspark, [greedy(prompt, 48) for prompt in PROMPTS], 8)
    stats = dspark.get_json("/dspark/stats")
    assert stats["policy"] == "auto"
    schedule = stats["schedule"]
    assert schedule["expected_tokens_per_s"] > 0
    assert len(schedule["lagged_survival"]) == stats["block_size"] == 7
    assert schedule["step_time"]["measured_ms"] > 0
    assert schedule["step_time"]["predicted_ms"] > 0
    if not torch.cuda.is_available():
        assert min(schedule["step_time"]["host_ms"].values()) > 0
    assert len(stats["calibration"]["scale"]) == 7


def test_static_verifies_what_it_says(dspark):
    with policy(dspark, "static", verify_len=2):
        before = dspark.get_json("/dspark/stats")
        output_ids(dspark, [greedy(prompt, 24) for prompt in PROMPTS], 4)
        after = dspark.get_json("/dspark/stats")
    rounds, verified = (after[key] - before[key] for key in ("rounds", "verified_tokens"))
    assert rounds > 0
    assert verified == 2 * rounds


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"policy": "fast"}, "policy='fast'"),
        ({"policy": "static", "verify_len": 8}, "verify-len=8 exceeds the 7 drafts"),
        ({"policy": "threshold"}, "confidence-threshold"),
        ({"verify_len": 3}, "policy is missing"),
        ([], "JSON object"),
    ],
)
def test_refused_policies_change_nothing(dspark, body, named):
    with pytest.raises(urllib.error.HTTPError) as caught:
        dspark.post_json("/dspark/policy", body)
    assert caught.value.code == 400
    assert named in caught.value.read().decode()
    assert dspark.get_json("/dspark/stats")["policy"] == "auto"
