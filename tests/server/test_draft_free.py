"""A server without a drafter: presets speculate, everything else decodes plainly, and the text is the target's."""

from __future__ import annotations

import urllib.error

import pytest
from golden_server import (
    CASES,
    assert_pool_is_whole,
    call,
    counting,
    generate,
    greedy,
    mixed_bodies,
    output_ids,
    policy,
    rounds_of,
    with_options,
)


def without_confidence(bodies):
    """There is no confidence head to bound anything by."""
    for body in bodies:
        body["speculation"] = {k: v for k, v in body["speculation"].items() if k != "confidence_threshold"}
    return bodies


@pytest.mark.parametrize("name", ["auto", pytest.param("off", marks=pytest.mark.thorough)])
def test_text_equals_the_target_alone(draft_free, plain, name):
    bodies = mixed_bodies(36, seed=21)
    expected = output_ids(plain, bodies, 16)
    with counting(draft_free) as counts, policy(draft_free, name):
        assert output_ids(draft_free, without_confidence(with_options(bodies[:9])), 1) == expected[:9]
        assert output_ids(draft_free, without_confidence(with_options(bodies)), 16) == expected
    assert (counts["copied_tokens"] > 0) == (name == "auto")
    assert counts["copied_tokens"] == counts["verified_tokens"]
    assert counts["drafted_tokens"] == 0
    assert_pool_is_whole(draft_free)


def test_only_presets_speculate(draft_free):
    def verified(**options):
        body = greedy(CASES[0]["prompt_ids"], 64, speculation={"trace": True, **options})
        [answer] = generate(draft_free, [body], 1)
        assert answer["output_ids"] == CASES[0]["output_ids"]
        return [entry["verified"] for entry in rounds_of(answer)]

    assert set(verified()) == {0}
    rounds = verified(preset="summarization")
    assert max(rounds) == 7
    assert len(rounds) < 40


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/generate", greedy([5, 6, 7], 4, speculation={"confidence_threshold": 0.5}), "confidence_threshold needs a"),
        ("/dspark/policy", {"policy": "static"}, "--speculative-dspark-draft-free serves without one"),
    ],
)
def test_what_needs_a_drafter_is_refused(draft_free, path, body, named):
    with pytest.raises(urllib.error.HTTPError) as caught:
        draft_free.post_json(path, body)
    assert caught.value.code == 400
    assert named in caught.value.read().decode()


def test_capabilities_without_a_drafter(draft_free):
    found = draft_free.get_json("/dspark/capabilities")
    assert (found["effective_decode_path"], found["drafter"]) == ("dspark", None)
    assert "requests that name a text speculate" in found["reason"]
    available = {name for name, policy in found["policies"].items() if policy["available"]}
    assert available == {"auto", "off"}
    served = set(found["features"]["speculation_fields"])
    assert {"preset", "trace"} <= served
    assert "confidence_threshold" not in served
    assert "no drafter" in draft_free.log_path.read_text()


def test_routes_behind_a_proxy(draft_free):
    """The proxy takes its prefix off, and the application sees it all the same."""
    assert call(draft_free, "/dspark")[0] == 200
    assert call(draft_free, "/dspark/stats")[0] == 200
    status, answer = call(draft_free, "/generate", body=greedy([5, 6], 2, speculation={"no_such_key": 1}))
    assert status == 400
    assert "no_such_key" in answer
    assert call(draft_free, "/pd_role_switch", body={})[0] == 400
