"""Sampled and seeded requests through a real server: the distribution of the text, and its reproducibility."""

from __future__ import annotations

import random
from typing import Any

from golden_server import CASES, TARGET, counting, greedy, in_background, output_ids, policy
from sampled_text import ALPHA, DEPTH, HOT, PROMPT, sample
from target_distribution import TargetDistribution, p_value

NUM_SAMPLES = 512

KINDS: dict[str, dict[str, float]] = {
    "temperature": {"temperature": HOT},
    "top-k": {"temperature": HOT, "top_k": 6},
    "top-p": {"temperature": HOT, "top_p": 0.8},
    "min-p": {"temperature": HOT, "min_p": 0.2},
    "all": {"temperature": HOT, "top_k": 12, "top_p": 0.9, "min_p": 0.05},
}


def distribution(parameters: dict[str, float], num_samples: int = NUM_SAMPLES) -> dict[Any, float]:
    return TargetDistribution(TARGET, PROMPT, **parameters).cells(DEPTH, min_prob=10 / num_samples)


def test_distribution_of_filtered_text(dspark):
    """Every filter at once; the same sample is told from one without filters, and of half the temperature."""
    assert len(distribution(KINDS["all"])) > 20  # cells
    with policy(dspark, "static"), counting(dspark) as counts:
        drawn = sample(dspark, KINDS["all"], NUM_SAMPLES)
    assert p_value(drawn, distribution(KINDS["all"])) > ALPHA
    assert counts["accepted_tokens"] < 0.95 * counts["verified_tokens"]  # enough rejected for a wrong rule to show
    for wrong in ({"temperature": 0.5 * HOT}, {"top_k": -1, "top_p": 1.0, "min_p": 0.0}):
        assert p_value(drawn, distribution(KINDS["all"] | wrong)) < ALPHA


def test_greedy_and_sampled_requests_share_batches(dspark, plain):
    """Greedy text is not disturbed by sampled neighbours, nor their distribution by it."""
    bodies = [greedy(case["prompt_ids"], 64) for case in CASES]
    texts: list[list[int]] = []
    thread = in_background(lambda: texts.extend(output_ids(dspark, bodies, 4)))
    drawn = sample(dspark, KINDS["temperature"], NUM_SAMPLES // 2)
    thread.join()
    assert texts == output_ids(plain, bodies, 4)
    assert p_value(drawn, distribution(KINDS["temperature"])) > ALPHA


def seeded_bodies() -> list[dict[str, Any]]:
    rng = random.Random(7)
    kinds = list(KINDS.values())
    return [
        {
            "input_ids": rng.choice(CASES)["prompt_ids"],
            "sampling_params": {
                **kinds[i % len(kinds)],
                "temperature": 1.5,
                "max_new_tokens": 24,
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


def test_a_request_id_can_be_used_again_with_other_parameters(dspark, plain):
    """Sampling parameters belong to the request, not to the id that the client chose for it."""
    hot = {"input_ids": PROMPT, "rid": "again", "sampling_params": {"temperature": 3.0, "max_new_tokens": 24}}
    cold = greedy(PROMPT, 24, rid="again")
    expected = output_ids(plain, [greedy(PROMPT, 24)])
    for _ in range(3):
        assert output_ids(dspark, [hot]) != expected
        assert output_ids(dspark, [cold]) == expected
