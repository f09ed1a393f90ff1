"""SGLang's own DSPARK under our schedule: its worker, whole, on a CPU with stand-ins for what it lacks there."""

from __future__ import annotations

import pytest
from golden_server import (
    CASES,
    TARGET,
    assert_pool_is_whole,
    call,
    counting,
    endless,
    generate,
    greedy,
    in_background,
    mixed_bodies,
    output_ids,
    policy,
    prompts,
    rounds_of,
)
from sampled_text import ALPHA, DEPTH, HOT, PROMPT, sample
from target_distribution import TargetDistribution, p_value

GOLDEN = [greedy(case["prompt_ids"], 64) for case in CASES]
TEXTS = [case["output_ids"] for case in CASES]
OPTIONS = ({}, {"enabled": False}, {"max_verify": 1}, {"max_verify": 3}, {"confidence_threshold": 0.8})


@pytest.mark.thorough
def test_it_serves_as_it_comes(builtin):
    """The stand-ins are right."""
    assert output_ids(builtin, GOLDEN, 1) == output_ids(builtin, GOLDEN, 6) == TEXTS
    assert call(builtin, "/dspark/stats")[0] == 404


@pytest.mark.parametrize(
    "name", ["auto", "random", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("off", "early-stop"))]
)
def test_golden_texts(scheduled, name):
    """Under every kind of budget, and with requests that set limits of their own."""
    with policy(scheduled, name), counting(scheduled) as grown:
        assert output_ids(scheduled, GOLDEN, 6) == TEXTS
        limited = [{**body, "speculation": OPTIONS[i % len(OPTIONS)]} for i, body in enumerate(GOLDEN)]
        assert output_ids(scheduled, limited, 2) == TEXTS
    assert (grown["verified_tokens"] > 0) == (name != "off")


def test_golden_traces(scheduled):
    """Drafts, verified and accepted counts of every golden case, and the counts of its answer."""
    for case in CASES:
        with policy(scheduled, "static"):
            [answer] = generate(scheduled, [greedy(case["prompt_ids"], 64, speculation={"trace": True})], 1)
        rounds = rounds_of(answer)
        assert [(r["start"], r["anchor"], r["draft"]) for r in rounds] == [
            (r["start"], r["anchor"], r["draft"]) for r in case["rounds"]
        ]
        assert [r["accepted"] for r in rounds[:-1]] == [r["accepted"] for r in case["rounds"][:-1]]
        assert {r["verified"] for r in rounds} == {7}
        counts = answer["meta_info"]["dspark"]
        assert counts["rounds"] == len(rounds)
        assert counts["drafted_tokens"] == counts["verified_tokens"] == 7 * len(rounds)


def test_limits_of_requests_hold(scheduled):
    """They are those of one batch; what they may not verify is left to others."""
    bodies = [
        greedy(case["prompt_ids"], 64, speculation={"max_verify": i % 4, "trace": True}) for i, case in enumerate(CASES)
    ]
    with policy(scheduled, "random"):
        answers = generate(scheduled, bodies, 6)
    assert [answer["output_ids"] for answer in answers] == TEXTS
    for i, answer in enumerate(answers):
        rounds = rounds_of(answer)
        assert max(r["verified"] for r in rounds) == i % 4
        assert all(r["accepted"] <= r["verified"] for r in rounds)


def test_a_parked_step_drafts_nothing(scheduled):
    with policy(scheduled, "off"):
        [answer] = generate(scheduled, [greedy(CASES[0]["prompt_ids"], 16, speculation={"trace": True})], 1)
    assert answer["output_ids"] == TEXTS[0][:16]
    assert {(r["verified"], len(r["draft"])) for r in rounds_of(answer)} == {(0, 0)}


def test_statistics(scheduled):
    """They count what traces list."""
    with policy(scheduled, "random"), counting(scheduled) as grown:
        answers = generate(scheduled, [{**body, "speculation": {"trace": True}} for body in GOLDEN], 4)
    rounds = [entry for answer in answers for entry in rounds_of(answer)]
    assert grown["rounds"] == len(rounds)
    assert grown["verified_tokens"] == sum(entry["verified"] for entry in rounds)
    assert grown["accepted_tokens"] <= sum(entry["accepted"] for entry in rounds)
    stats = scheduled.get_json("/dspark/stats")
    assert stats["policy"] == "auto"
    assert stats["schedule"]["step_time"] is not None
    found = scheduled.get_json("/dspark/capabilities")
    assert (found["engine"], found["block_size"]) == ("scheduled", 7)
    assert "preset" not in found["features"]["speculation_fields"]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"speculation": {"preset": "summarization"}}, "preset"),
        ({"sampling_params": {"min_p": 0.1}}, "min_p"),
        ({"sampling_params": {"sampling_seed": 1}}, "sampling_seed"),
    ],
)
def test_what_it_would_ignore_is_refused(scheduled, fields, name):
    status, text = call(scheduled, "/generate", body={"input_ids": [5, 6], **fields})
    assert status == 400
    assert name in text


def distribution(temperature, num_samples):
    exact = TargetDistribution(TARGET, PROMPT, temperature=temperature)
    return exact.cells(DEPTH, min_prob=10 / num_samples)


@pytest.mark.thorough
def test_distribution_of_sampled_text(scheduled):
    """Budgets, parked steps and limits do not show in the text; a temperature 8 % off does."""
    num_samples = 2048
    with policy(scheduled, "random"):
        drawn = sample(scheduled, {"temperature": HOT}, num_samples)
    assert p_value(drawn, distribution(HOT, num_samples)) > ALPHA
    assert p_value(drawn, distribution(0.92 * HOT, num_samples)) < ALPHA


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["off", "random"])
def test_greedy_and_sampled_requests_share_steps(scheduled, name):
    texts: list[list[int]] = []
    with policy(scheduled, name):
        thread = in_background(lambda: texts.extend(output_ids(scheduled, GOLDEN * 6, 4)))
        drawn = sample(scheduled, {"temperature": HOT}, 512)
        thread.join()
    assert texts == TEXTS * 6
    assert p_value(drawn, distribution(HOT, 512)) > ALPHA


@pytest.mark.thorough
def test_prefix_hits_chunks_and_retraction(scheduled_corner, plain):
    bodies = mixed_bodies(27, seed=1)
    expected = output_ids(plain, bodies, 16)
    for name in ("random", "auto"):
        with policy(scheduled_corner, name):
            assert output_ids(scheduled_corner, bodies, 16) == expected
    assert_pool_is_whole(scheduled_corner)


@pytest.mark.thorough
def test_two_ranks_with_clocks_of_their_own(scheduled_parallel):
    for name in ("auto", "random", "off"):
        with policy(scheduled_parallel, name):
            assert output_ids(scheduled_parallel, GOLDEN, 4) == TEXTS
            long = [endless(prompt, 24) for prompt in prompts(8, seed=2)]
            assert {len(text) for text in output_ids(scheduled_parallel, long)} == {24}
