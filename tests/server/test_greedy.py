"""Tests of greedy, sampled and seeded texts of real servers, our worker's and SGLang's own.

Servers of random weights keep drafts by chance, and regrets judge texts in 16 bits.
"""

from __future__ import annotations

import random
from array import array
from itertools import pairwise
from typing import Any
from zlib import crc32

import pytest
import torch
from dspark_kernels import SimulatedDraws, simulated_accept
from golden_server import (
    CASES,
    DRAFTER_ALONE,
    PACE_MS,
    TARGET,
    assert_golden_traces,
    assert_pool_is_whole,
    begun_stream,
    counting,
    endless,
    generate,
    greedy,
    in_background,
    mixed_bodies,
    outcomes_of,
    output_ids,
    policy,
    prompts,
    wait_for_tokens,
    with_options,
)
from regrets import regrets
from target_distribution import ALPHA, DEPTH, HOT, PROMPT, TargetDistribution, p_value, sample

from sglang_dspark.scheduling.simulated_acceptance import acceptance_probabilities
from sglang_dspark.tools.launch import LaunchedServer

POLICIES: list[dict[str, Any]] = [
    {"name": "auto"},
    {"name": "random"},
    {"name": "early-stop"},
    {"name": "threshold", "confidence_threshold": 0.6},
    {"name": "static", "verify_len": 1},
    {"name": "off"},
]


def test_golden_traces(dspark):
    """Drafts, verified and accepted counts, and text of every golden case."""
    assert_golden_traces(dspark)


def rounds_after(server, ids, number):
    """Return the first rounds after a prompt under ``static``, and how many of its tokens were cached."""
    with policy(server, "static"):
        [answer] = generate(server, [endless(ids, 8 * number, speculation=DRAFTER_ALONE)], 1)
    return outcomes_of(answer)[:number], answer["meta_info"]["cached_tokens"]


def test_drafts_after_plain_steps(dspark):
    """Of a text while which the policy changes, and after a cached one: those after a prompt of the same tokens."""
    answers: list[dict[str, Any]] = []
    body = endless(CASES[0]["prompt_ids"], 120, speculation=DRAFTER_ALONE)
    with policy(dspark, "off", pace_ms=PACE_MS):
        before = dspark.get_json("/dspark/stats")
        thread = in_background(lambda: answers.extend(generate(dspark, [body], 1)))
        wait_for_tokens(dspark, before, 20)
        with policy(dspark, "static"):
            thread.join()
    text = CASES[0]["prompt_ids"] + answers[0]["output_ids"]
    behind = [outcome for outcome in outcomes_of(answers[0]) if outcome[1]][:6]
    start = behind[0][0]
    assert start >= len(CASES[0]["prompt_ids"]) + 20
    dspark.flush_cache()
    expected, _ = rounds_after(dspark, text[:start], 6)
    assert behind == expected
    dspark.flush_cache()
    with policy(dspark, "off"):
        generate(dspark, [endless(CASES[0]["prompt_ids"], start - len(CASES[0]["prompt_ids"]))], 1)
    found, cached = rounds_after(dspark, text[:start], 6)
    assert found == expected and cached >= start - 2


def test_text_equals_the_target_alone(dspark, plain):
    check_text(dspark, plain)


def test_text_without_overlap_with_chunked_prefill_in_pages_and_a_short_block(corner, plain):
    """The target's own text depends on none of them in float32."""
    found = corner.get_json("/dspark/capabilities")
    assert found["drafter"]["window"] == {"size": 12, "sinks": 4} and found["block_size"] == 3
    assert [said.split(":")[0] for said in found["adjusted_flags"]] == [
        "--speculative-num-draft-tokens=4 becomes --speculative-dspark-block-size=3",
    ]
    check_text(corner, plain)


def check_text(server, plain):
    bodies = mixed_bodies(18, seed=1)
    expected = output_ids(plain, bodies, 16)
    with policy(server, "random"):
        assert output_ids(server, bodies[:4], 1) == expected[:4]
        assert output_ids(server, bodies, 16) == expected
    assert output_ids(server, with_options(bodies), 16) == expected


def test_text_while_policies_change_under_load(dspark, plain):
    """Each policy by itself: tests/worker/test_eager_executor.py."""
    bodies = mixed_bodies(27, seed=4)
    expected = output_ids(plain, bodies, 16)
    texts: list[list[int]] = []
    thread = in_background(lambda: texts.extend(output_ids(dspark, bodies, 8)))
    while thread.is_alive():
        for settings in POLICIES:
            with policy(dspark, **settings):
                thread.join(0.2)
    assert texts == expected


def test_abort_in_mid_stream(dspark, plain):
    """Clients that go away leave no slots behind and do not disturb their neighbours."""
    bodies = mixed_bodies(12, seed=5)
    for i in range(6):
        with begun_stream(dspark, endless(prompts(6, seed=i)[i], 800)):
            if i == 0:
                started = output_ids(dspark, bodies, 4)
    assert started == output_ids(plain, bodies, 4)
    assert_pool_is_whole(dspark)


NUM_SAMPLES = 512

KINDS: dict[str, dict[str, float]] = {
    "temperature": {"temperature": HOT},
    "top-k": {"temperature": HOT, "top_k": 6},
    "top-p": {"temperature": HOT, "top_p": 0.8},
    "min-p": {"temperature": HOT, "min_p": 0.2},
    "all": {"temperature": HOT, "top_k": 12, "top_p": 0.9, "min_p": 0.05},
}


def distribution(parameters: dict[str, float]) -> dict[Any, float]:
    return TargetDistribution(TARGET, PROMPT, **parameters).cells(DEPTH, min_prob=10 / NUM_SAMPLES)


def test_distribution_of_filtered_text(dspark):
    """Every filter at once, next to greedy requests, which neither disturb it nor are disturbed.

    The same sample is told from one without filters, and of half the temperature.
    """
    expected, bodies = distribution(KINDS["all"]), [greedy(case["prompt_ids"], 64) for case in CASES]
    assert len(expected) > 20  # cells
    texts: list[list[int]] = []
    with policy(dspark, "static"), counting(dspark) as counts:
        thread = in_background(lambda: texts.extend(output_ids(dspark, bodies, 4)))
        drawn = sample(dspark, KINDS["all"], NUM_SAMPLES)
        thread.join()
    assert texts == [case["output_ids"] for case in CASES]
    assert p_value(drawn, expected) > ALPHA
    assert counts["accepted_tokens"] < 0.95 * counts["verified_tokens"]  # enough rejected for a wrong rule to show
    for wrong in ({"temperature": 0.5 * HOT}, {"top_k": -1, "top_p": 1.0, "min_p": 0.0}):
        assert p_value(drawn, distribution(KINDS["all"] | wrong)) < ALPHA


def seeded_bodies() -> list[dict[str, Any]]:
    rng = random.Random(7)
    kinds = list(KINDS.values())
    return [
        {
            "input_ids": rng.choice(CASES)["prompt_ids"],
            "sampling_params": {
                **kinds[i % len(kinds)],
                "temperature": 1.5,
                "max_new_tokens": 16,
                "sampling_seed": 1000 + i,
            },
        }
        for i in range(2 * len(KINDS))
    ]


def test_seeded_text_does_not_depend_on_load_policy_or_drafter(dspark, corner, dflash):
    bodies = seeded_bodies()
    expected = output_ids(dspark, bodies, 1)
    assert len({tuple(ids) for ids in expected}) > 6
    with policy(dspark, "random"):
        assert output_ids(dspark, bodies, 16) == expected
    assert output_ids(corner, bodies, 16) == expected
    kept = []
    for server in (dspark, dflash):
        with policy(server, "static"), counting(server) as counts:
            assert output_ids(server, bodies, 16) == expected
        kept.append(counts["accepted_tokens"] / counts["rounds"])
    assert kept[1] < 0.8 * kept[0]  # a drafter that knows nothing


def test_a_request_id_can_be_used_again_with_other_parameters(dspark):
    """Sampling parameters belong to the request, not to the id that the client chose for it."""
    hot = {"input_ids": PROMPT, "rid": "again", "sampling_params": {"temperature": 3.0, "max_new_tokens": 24}}
    cold = greedy(PROMPT, 24, rid="again")
    expected = [CASES[2]["output_ids"][:24]]
    for _ in range(2):
        assert output_ids(dspark, [hot]) != expected
        assert output_ids(dspark, [cold]) == expected


RATES = (0.9, 0.6, 0.8, 0.7, 0.7, 0.7, 0.7)
PROMPTS = prompts(9, seed=5)


def answers(server: LaunchedServer, **given):
    return generate(server, [endless(prompt, 40, **given) for prompt in PROMPTS], 4)


def steps_of(answer):
    """Return how many steps a request took, and how many of these kept 0, 1, ... drafts."""
    return answer["meta_info"]["spec_verify_ct"], answer["meta_info"]["spec_correct_drafts_histogram"]


@pytest.mark.thorough
def test_both_workers_take_the_same_steps(simulated, simulated_builtin):
    """They are the same whichever requests share the steps."""
    with policy(simulated, "static"):
        ours = [steps_of(answer) for answer in answers(simulated)]
    own = [steps_of(answer) for answer in answers(simulated_builtin)]
    assert ours == own
    assert len({steps for steps, _ in own}) > 2  # requests end apart


@pytest.mark.parametrize(
    ("name", "fields", "most"), [("static", {}, 7), ("static", {"verify_len": 2}, 2), ("auto", {}, 7)]
)
@pytest.mark.thorough
def test_drafts_are_kept_by_key_and_position(simulated, name, fields, most):
    with policy(simulated, name, **fields):
        found = answers(simulated, speculation={"trace": True})
    quantiles = torch.from_numpy(acceptance_probabilities(RATES))
    for prompt, answer in zip(PROMPTS, found, strict=True):
        ids, trace = answer["output_ids"], answer["meta_info"]["dspark_trace"]
        draws = SimulatedDraws(torch.tensor([crc32(array("q", prompt).tobytes())]), quantiles)
        starts = [place for place, entry in enumerate(trace) if entry is not None]
        assert len(ids) == 40 and len(starts) > 4
        # The last round may run past the tokens that were asked for.
        for start, end in pairwise(starts):
            entry = trace[start]
            assert ids[start : end - 1] == entry["draft"][: entry["accepted"]] and end - start == entry["accepted"] + 1
            anchor = torch.tensor([len(prompt) + start - 1])
            row, block = torch.zeros(1, dtype=torch.int64), torch.zeros((1, 7), dtype=torch.int64)
            kept = simulated_accept(draws, row, anchor, block, row).accept_lens
            assert entry["accepted"] == min(int(kept), entry["verified"]) and entry["verified"] <= most


@pytest.mark.thorough
def test_simulated_acceptance_is_announced(simulated, simulated_builtin):
    assert simulated.get_json("/dspark/capabilities")["simulated_acceptance"] == [*RATES]
    for server in (simulated, simulated_builtin):
        assert "acceptance is simulated" in server.log_path.read_text()


REGRET_PROMPTS = [case["prompt_ids"] for case in CASES[:3]]


def test_a_wrong_token_is_regretted_and_no_other_before_it(plain):
    texts = output_ids(plain, [endless(prompt, 16) for prompt in REGRET_PROMPTS], 1)
    found = regrets(plain, REGRET_PROMPTS, texts)
    assert [len(regret) for regret in found] == [16] * len(REGRET_PROMPTS)
    assert max(map(max, found)) < 1e-3
    texts[1][5] = 0  # a token that no text of the target has
    [wrong] = regrets(plain, REGRET_PROMPTS[1:2], texts[1:2])
    assert max(wrong[:5]) < 1e-3 < 1 < wrong[5]
