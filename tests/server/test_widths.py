"""SGLang's own DSPARK with as many drafts verified of every request, as ``auto`` starts it where our worker refuses."""

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
OPTIONS = ({}, {"enabled": False}, {"max_verify": 1}, {"max_verify": 3})


def test_why_it_runs(widths):
    """The log and the capabilities say it in one line."""
    found = widths.get_json("/dspark/capabilities")
    assert found["engine"] == "scheduled"
    assert "OfSglangAloneForCausalLM" in found["reason"]
    assert "all requests verify the same number of drafts (the attention backend torch_native" in found["reason"]
    assert found["reason"] in widths.log_path.read_text()
    available = {name for name, known in found["policies"].items() if known["available"]}
    assert available == {"auto", "static", "off"}
    status, text = call(widths, "/generate", body={"input_ids": [5, 6], "speculation": {"confidence_threshold": 0.5}})
    assert status == 400
    assert "confidence_threshold" in text


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("auto", {}),
        ("random", {}),
        *(pytest.param("static", {"verify_len": n}, marks=pytest.mark.thorough) for n in (1, 2, 5)),
    ],
)
def test_golden_texts(widths, name, fields):
    """At every width, and with requests that set limits of their own, which cut what is accepted of them."""
    with policy(widths, name, **fields), counting(widths) as grown:
        assert output_ids(widths, GOLDEN, 6) == TEXTS
        limited = [{**body, "speculation": OPTIONS[i % len(OPTIONS)]} for i, body in enumerate(GOLDEN)]
        assert output_ids(widths, limited, 4) == TEXTS
    assert grown["verified_tokens"] > 0


@pytest.mark.parametrize(("name", "fields", "verified"), [("static", {}, 7), ("static", {"verify_len": 3}, 3)])
def test_golden_traces(widths, name, fields, verified):
    """Drafts and accepted counts of a golden case, of blocks that are cut to the width."""
    case = CASES[0]
    with policy(widths, name, **fields):
        [answer] = generate(widths, [greedy(case["prompt_ids"], 64, speculation={"trace": True})], 1)
    rounds = rounds_of(answer)
    assert {(r["verified"], len(r["draft"])) for r in rounds} == {(verified, verified)}
    whole = {r["start"]: r for r in case["rounds"]}
    met = [(r, whole[r["start"]]) for r in rounds[:-1] if r["start"] in whole]
    assert met
    assert [r["draft"] for r, _ in met] == [known["draft"][:verified] for _, known in met]
    assert [r["accepted"] for r, _ in met] == [min(known["accepted"], verified) for _, known in met]


def test_limits_of_requests_hold(widths):
    """Beside requests without one: rows past a limit are computed, and nothing of them is accepted."""
    bodies = [
        greedy(case["prompt_ids"], 64, speculation={"max_verify": i % 4, "trace": True}) for i, case in enumerate(CASES)
    ]
    with policy(widths, "static"):
        answers = generate(widths, bodies, 6)
    assert [answer["output_ids"] for answer in answers] == TEXTS
    for i, answer in enumerate(answers):
        rounds = rounds_of(answer)
        assert {r["verified"] for r in rounds} == {i % 4}
        assert all(r["accepted"] <= r["verified"] for r in rounds)


def test_a_parked_step_drafts_nothing(widths):
    with policy(widths, "off"):
        [answer] = generate(widths, [greedy(CASES[0]["prompt_ids"], 16, speculation={"trace": True})], 1)
    assert answer["output_ids"] == TEXTS[0][:16]
    assert {(r["verified"], len(r["draft"])) for r in rounds_of(answer)} == {(0, 0)}


def test_statistics(widths):
    with policy(widths, "random"), counting(widths) as grown:
        answers = generate(widths, [{**body, "speculation": {"trace": True}} for body in GOLDEN], 4)
    rounds = [entry for answer in answers for entry in rounds_of(answer)]
    assert grown["rounds"] == len(rounds)
    assert grown["verified_tokens"] == sum(entry["verified"] for entry in rounds)
    assert widths.get_json("/dspark/stats")["calibration"] is None


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "fields"), [("random", {}), ("off", {}), ("static", {"verify_len": 1})])
def test_distribution_of_sampled_text(widths, name, fields):
    """Widths, parked steps and cuts do not show in the text, whatever greedy requests are in the batch."""
    num_samples, texts = 1024, []
    with policy(widths, name, **fields):
        thread = in_background(lambda: texts.extend(output_ids(widths, GOLDEN * 3, 2)))
        drawn = sample(widths, {"temperature": HOT}, num_samples)
        thread.join()
    exact = TargetDistribution(TARGET, PROMPT, temperature=HOT)
    assert p_value(drawn, exact.cells(DEPTH, min_prob=10 / num_samples)) > ALPHA
    assert texts == TEXTS * 3


@pytest.mark.thorough
def test_prefix_hits_and_retraction(widths, plain):
    bodies = mixed_bodies(27, seed=1)
    expected = output_ids(plain, bodies, 16)
    for name in ("random", "auto"):
        with policy(widths, name):
            assert output_ids(widths, bodies, 16) == expected
    assert_pool_is_whole(widths)


@pytest.mark.thorough
def test_two_ranks_with_clocks_of_their_own(widths_parallel):
    for name in ("auto", "random", "off"):
        with policy(widths_parallel, name):
            assert output_ids(widths_parallel, GOLDEN, 4) == TEXTS
            long = [endless(prompt, 24) for prompt in prompts(8, seed=2)]
            assert {len(text) for text in output_ids(widths_parallel, long)} == {24}
