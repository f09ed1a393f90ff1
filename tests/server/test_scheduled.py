"""SGLang's own worker under our schedule: its worker, whole, on a CPU with stand-ins for what it lacks there.

``scheduled`` verifies another number of drafts of every request. ``whole_blocks`` computes all drafts, and cuts what is
accepted; our worker refuses its target, as that of ``builtin``, which ``auto`` leaves to SGLang's worker, unmodified.
"""

from __future__ import annotations

import pytest
from golden_server import (
    CASES,
    TARGET,
    assert_golden_traces,
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
    refused,
    rounds_of,
    traced,
)
from target_distribution import ALPHA, DEPTH, HOT, PROMPT, TargetDistribution, p_value, sample

GOLDEN = [greedy(case["prompt_ids"], 64) for case in CASES]
TEXTS = [case["output_ids"] for case in CASES]
LIMITS = ({}, {"enabled": False}, {"max_verify": 1}, {"max_verify": 3})


@pytest.mark.thorough
def test_what_ours_does_not_serve_is_left_as_it_comes(builtin):
    """Nothing of ours is there, and the stand-ins are right."""
    assert output_ids(builtin, GOLDEN, 1) == output_ids(builtin, GOLDEN, 6) == TEXTS
    assert call(builtin, "/dspark/stats")[0] == 404
    log = builtin.log_path.read_text()
    assert "decodes, unmodified: the plugin's worker does not serve OfSglangAloneForCausalLM" in log
    assert "drives this scheduler" not in log and "measuring step times" not in log


def check_golden_texts(server, options, name, **fields):
    """Check the texts of plain requests, and of requests that set limits of their own."""
    with policy(server, name, **fields), counting(server) as grown:
        assert output_ids(server, GOLDEN, 6) == TEXTS
        limited = [{**body, "speculation": options[i % len(options)]} for i, body in enumerate(GOLDEN)]
        assert output_ids(server, limited, 3) == TEXTS
    # What is fastest is verified: it may be nothing.
    assert name in ("auto", "early-stop") or (grown["verified_tokens"] > 0) == (name != "off")


@pytest.mark.parametrize(
    "name", ["random", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("auto", "off", "early-stop"))]
)
def test_golden_texts(scheduled, name):
    """Under every kind of budget."""
    check_golden_texts(scheduled, (*LIMITS, {"confidence_threshold": 0.8}), name)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("auto", {}),
        pytest.param("random", {}, marks=pytest.mark.thorough),
        *(pytest.param("static", {"verify_len": n}, marks=pytest.mark.thorough) for n in (1, 2, 5)),
    ],
)
def test_golden_texts_of_blocks_that_are_cut(whole_blocks, name, fields):
    """Limits cut what is accepted."""
    check_golden_texts(whole_blocks, LIMITS, name, **fields)


def test_golden_traces(scheduled):
    assert_golden_traces(scheduled, asked={"trace": True})


@pytest.mark.parametrize(("fields", "verified"), [({}, 7), ({"verify_len": 3}, 3)])
def test_golden_traces_of_blocks_that_are_cut(whole_blocks, fields, verified):
    case = CASES[0]
    with policy(whole_blocks, "static", **fields):
        _, rounds = traced(whole_blocks, GOLDEN[0])
    assert {(r["verified"], len(r["draft"])) for r in rounds} == {(verified, verified)}
    whole = {r["start"]: r for r in case["rounds"]}
    met = [(r, whole[r["start"]]) for r in rounds[:-1] if r["start"] in whole]
    assert met
    assert [r["draft"] for r, _ in met] == [known["draft"][:verified] for _, known in met]
    assert [r["accepted"] for r, _ in met] == [min(known["accepted"], verified) for _, known in met]


def check_limits_and_counts(server, name):
    """Return what was verified in the rounds of requests with a limit of 0, 1, 2, 3, 0, ...; statistics count them."""
    bodies = [{**body, "speculation": {"max_verify": i % 4, "trace": True}} for i, body in enumerate(GOLDEN)]
    with policy(server, name), counting(server) as grown:
        answers = generate(server, bodies, 6)
    assert [answer["output_ids"] for answer in answers] == TEXTS
    traces = [rounds_of(answer) for answer in answers]
    rounds = [entry for trace in traces for entry in trace]
    assert all(entry["accepted"] <= entry["verified"] for entry in rounds)
    assert grown["rounds"] == len(rounds)
    assert grown["verified_tokens"] == sum(entry["verified"] for entry in rounds)
    assert grown["accepted_tokens"] <= sum(entry["accepted"] for entry in rounds)
    return [{entry["verified"] for entry in trace} for trace in traces]


def test_limits_of_requests_hold(scheduled):
    """They are those of one batch; what they may not verify is left to others."""
    verified = check_limits_and_counts(scheduled, "random")
    assert [max(lengths) for lengths in verified] == [i % 4 for i in range(len(CASES))]


def test_limits_of_requests_hold_in_whole_blocks(whole_blocks):
    """Rows past a limit are computed, and nothing of them is accepted."""
    assert check_limits_and_counts(whole_blocks, "static") == [{i % 4} for i in range(len(CASES))]


def test_a_parked_step_drafts_nothing(scheduled, whole_blocks):
    for server in (scheduled, whole_blocks):
        with policy(server, "off"):
            answer, rounds = traced(server, greedy(CASES[0]["prompt_ids"], 16))
        assert answer["output_ids"] == TEXTS[0][:16]
        assert {(r["verified"], len(r["draft"])) for r in rounds} == {(0, 0)}


def test_what_the_server_says_of_itself(scheduled):
    stats = scheduled.get_json("/dspark/stats")
    assert stats["policy"] == "auto"
    assert stats["schedule"]["step_time"] is not None
    found = scheduled.get_json("/dspark/capabilities")
    assert (found["engine"], found["block_size"]) == ("scheduled", 7)
    assert "preset" not in found["features"]["speculation_fields"]


def test_why_blocks_are_whole(whole_blocks):
    """The log and the capabilities say it in one line."""
    found = whole_blocks.get_json("/dspark/capabilities")
    assert found["engine"] == "scheduled"
    assert "of which the policy decides what counts (its attention backend, torch_native, takes" in found["reason"]
    assert found["reason"] in whole_blocks.log_path.read_text()
    available = {name for name, known in found["policies"].items() if known["available"]}
    assert available == {"auto", "static", "off"}
    assert whole_blocks.get_json("/dspark/stats")["calibration"] is None


def test_what_would_be_ignored_is_refused(scheduled, whole_blocks):
    for server, fields, name in (
        (scheduled, {"speculation": {"preset": "summarization"}}, "preset"),
        (scheduled, {"sampling_params": {"min_p": 0.1}}, "min_p"),
        (scheduled, {"sampling_params": {"sampling_seed": 1}}, "sampling_seed"),
        (whole_blocks, {"speculation": {"confidence_threshold": 0.5}}, "confidence_threshold"),
    ):
        assert name in refused(server, "/generate", {"input_ids": [5, 6], **fields})


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
@pytest.mark.parametrize(("name", "fields"), [("random", {}), ("off", {}), ("static", {"verify_len": 1})])
def test_greedy_and_sampled_requests_share_steps(whole_blocks, name, fields):
    """Neither shows in the texts of the other."""
    texts: list[list[int]] = []
    with policy(whole_blocks, name, **fields):
        thread = in_background(lambda: texts.extend(output_ids(whole_blocks, GOLDEN * 3, 4)))
        drawn = sample(whole_blocks, {"temperature": HOT}, 1024)
        thread.join()
    assert texts == TEXTS * 3
    assert p_value(drawn, distribution(HOT, 1024)) > ALPHA


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["scheduled_corner", "whole_blocks"])
def test_prefix_hits_chunks_and_retraction(request, name, plain):
    server, bodies = request.getfixturevalue(name), mixed_bodies(27, seed=1)
    expected = output_ids(plain, bodies, 16)
    for chosen in ("random", "auto"):
        with policy(server, chosen):
            assert output_ids(server, bodies, 16) == expected
    assert_pool_is_whole(server)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["scheduled_parallel", "whole_blocks_parallel"])
def test_two_ranks(request, name):
    """Each has a clock of its own."""
    server = request.getfixturevalue(name)
    for chosen in ("auto", "random", "off"):
        with policy(server, chosen):
            assert output_ids(server, GOLDEN, 4) == TEXTS
            long = [endless(prompt, 24) for prompt in prompts(8, seed=2)]
            assert {len(text) for text in output_ids(server, long)} == {24}
