"""Tests of the ``speculation`` field through a real server: none of its keys changes the text.

Other parameters are accepted and refused as on the plain server.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from golden_server import (
    CASES,
    TARGET,
    VOCAB,
    call,
    counting,
    endless,
    generate,
    greedy,
    last_answer,
    output_ids,
    policy,
    rounds_of,
    traced,
)


@pytest.mark.parametrize(
    ("name", "options", "most"),
    [
        ("static", {"enabled": False}, 0),
        ("static", {"max_verify": 0}, 0),
        ("static", {"max_verify": 9}, 7),
        *((name, {"max_verify": 2}, 2) for name in ("static", "auto", "early-stop", "random")),
    ],
)
def test_no_more_drafts_are_verified_than_asked_for(dspark, name, options, most):
    with policy(dspark, name):
        answer, rounds = traced(dspark, greedy(CASES[1]["prompt_ids"], 64), **options)
    assert answer["output_ids"] == CASES[1]["output_ids"]
    verified = [entry["verified"] for entry in rounds]
    assert max(verified) <= most
    if name == "static":
        assert set(verified) == {most}
    elif name == "random":
        assert any(verified)


def test_a_bound_by_confidence_cuts_every_block(dspark):
    body = greedy(CASES[2]["prompt_ids"], 64)
    with policy(dspark, "static"):
        _, rounds = traced(dspark, body, confidence_threshold=0.9)
    for entry in rounds:
        probability = [1 / (1 + 2.718281828459045**-logit) for logit in entry["confidence"]]
        assert entry["verified"] == next((i for i, p in enumerate(probability) if p < 0.9), 7)
    assert len({entry["verified"] for entry in rounds}) > 1


def continuation(text, min_ngram, max_ngram, most):
    """Prompt lookup by its definition."""
    for length in range(max_ngram, min_ngram - 1, -1):
        for start in range(len(text) - length - 1, -1, -1):
            if text[start : start + length] == text[len(text) - length :]:
                period = len(text) - start - length
                return [text[start + length + place % period] for place in range(most)]
    return []


@pytest.mark.parametrize("name", ["auto", "static", "threshold"])
def test_summarization_copies_what_followed(dspark, name):
    """The golden target falls into a loop, so that what is copied is right most of the time; after it drafts go on.

    Steps of ``auto`` are plain on a machine on which these are the fastest.
    """
    prompt = CASES[0]["prompt_ids"]
    with policy(dspark, name, **({"confidence_threshold": 0.5} if name == "threshold" else {})):
        answer, rounds = traced(dspark, greedy(prompt, 64), preset="summarization", max_draft=5)
    text = answer["output_ids"]
    assert text == CASES[0]["output_ids"]
    drafting = [entry for entry in rounds if entry["draft"]]
    for entry in drafting:
        before = (prompt + text)[: entry["start"] + 1]
        expected = continuation(before, 3, 5, 5)
        assert entry["copied"] == bool(expected)
        assert entry["draft"][:5] == expected[: len(entry["draft"])] or not expected
        assert name != "static" or entry["verified"] == len(entry["draft"]) == 7
    if name != "auto":
        copied = [entry for entry in rounds[:-1] if entry["copied"]]
        assert len(copied) > 4
        assert sum(entry["accepted"] for entry in copied) > 0.6 * sum(entry["verified"] for entry in copied)
        assert drafting == rounds and any(not entry["copied"] for entry in rounds)


@pytest.mark.parametrize(("least", "most"), [(1, 1), (2, 8), (5, 5)])
def test_bounds_of_the_lookup_hold(draft_free, least, most):
    """Without a drafter, drafts are what was copied and nothing else."""
    prompt, options = CASES[0]["prompt_ids"], {"min_ngram": least, "max_ngram": most}
    answer, rounds = traced(draft_free, greedy(prompt, 64), preset="summarization", **options)
    text = answer["output_ids"]
    assert text == CASES[0]["output_ids"]
    for entry in rounds:
        assert entry["draft"] == continuation((prompt + text)[: entry["start"] + 1], least, most, 7)
    assert {bool(entry["draft"]) for entry in rounds} == {True, False}


def test_slos_are_weighed_counted_and_answered(dspark):
    """Four of eight users have an SLO: two one that is always met, and two one that no server can meet."""
    asked = [{"tpot_ms": 10_000}, {"weight": 0.2}, {"tpot_ms": 0.1}, None] * 2
    bodies = [greedy(case["prompt_ids"], 64) for case in CASES[:4]] * 2
    bodies = [{**body, "speculation": options} for body, options in zip(bodies, asked, strict=True)]
    bodies[0]["stream"] = True
    before = dspark.get_json("/dspark/stats")["slos"]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda body: last_answer(dspark, body), bodies))
    assert [answer["output_ids"] for answer in answers] == [case["output_ids"] for case in CASES[:4]] * 2
    slos = [answer["meta_info"].get("dspark_slo") for answer in answers]
    outcomes = [slo and (slo["slo_tpot_ms"], slo["outcome"]) for slo in slos]
    assert outcomes == [(10_000.0, "met"), None, (0.1, "infeasible"), None] * 2
    completion = {"model": "m", "prompt": "a", "max_tokens": 8, "ignore_eos": True, "speculation": {"tpot_ms": 9999}}
    assert dspark.post_json("/v1/completions", completion)["choices"]
    after = dspark.get_json("/dspark/stats")["slos"]
    assert {outcome: after[outcome] - before[outcome] for outcome in after} == {"met": 3, "missed": 0, "infeasible": 2}
    found = dspark.get_json("/dspark/capabilities")["slo"]
    assert found["tpot_ms"] is None and found["least_tpot_ms"] > 0


@pytest.mark.parametrize("name", ["auto", "static", "threshold"])
def test_blocks_go_on_after_the_drafters(letters, name):
    """Seven drafts of a block are the drafter's; eight more are copied where they follow a chain, whatever its source.

    What the first texts show of their chains is learned. Under ``auto``, step times may say that no ninth row is worth
    its time.
    """
    bodies = [greedy(case["prompt_ids"], 64) for case in CASES[:3]]
    bodies.append(endless(CASES[0]["prompt_ids"], 64, {"temperature": 0.2, "sampling_seed": 3}))
    with policy(letters, "static", verify_len=7):
        expected = output_ids(letters, bodies, 4)
    traced_bodies = [{**body, "speculation": {"trace": True}} for body in bodies * 2]
    with policy(letters, name, **({"confidence_threshold": 0.3} if name == "threshold" else {})):
        answers = generate(letters, traced_bodies, 4)
    assert [answer["output_ids"] for answer in answers] == expected * 2
    rounds = [entry for answer in answers for entry in rounds_of(answer)]
    if name in ("static", "threshold"):
        assert max(entry["accepted"] for entry in rounds) > 7
    assert all(entry["verified"] <= 15 for entry in rounds)


def test_classification_proposes_the_rest_of_a_label(draft_free):
    """The text goes on ``red stone . the large stone finds the ...``, and nothing but presets is verified."""
    case = CASES[0]
    labels = {"large stone finds the": [7, 21, 29, 33], "stone . the large boat": [21, 39, 33, 7, 23]}
    asked = {"preset": "classification", "candidates": list(labels)}
    answer, rounds = traced(draft_free, greedy(case["prompt_ids"], 40), **asked)
    text = answer["output_ids"]
    assert text == case["output_ids"][:40]
    for entry in rounds:
        output = text[: entry["start"] + 1 - len(case["prompt_ids"])]
        begun = [
            label[place:]
            for place in (4, 3, 2, 1)
            for label in labels.values()
            if place < len(label) and output[-place:] == label[:place]
        ]
        assert entry["draft"] == (begun[0] if begun else [])
        assert entry["verified"] == len(entry["draft"])
    whole = [entry for entry in rounds[:-1] if 1 < len(entry["draft"]) == entry["accepted"]]
    partly = [entry for entry in rounds[:-1] if entry["accepted"] < len(entry["draft"])]
    assert whole
    assert partly


def test_a_predicted_answer_is_verified_without_a_drafter(draft_free):
    body = greedy(CASES[0]["prompt_ids"], 64)
    [plain] = generate(draft_free, [body], 1)
    predicted = {"type": "content", "content": plain["text"]}
    whole, rounds = traced(draft_free, body, prediction=predicted)
    late, others = traced(draft_free, body, prediction=predicted | {"content": "the red dog . " + plain["text"]})
    assert whole["output_ids"] == late["output_ids"] == CASES[0]["output_ids"]
    assert [entry["accepted"] for entry in rounds[:-1]] == [7] * (len(rounds) - 1)
    # An answer that begins otherwise is copied from once it goes on as predicted.
    assert others[-2]["accepted"] == 7


def test_answers_are_copied_only_under_their_key(dflash):
    """With a drafter that knows nothing; few texts repeat themselves, but seeds write all of them again."""
    rng, texts, rounds = random.Random(9), {}, {}
    bodies = [endless(rng.choices(VOCAB, k=12), 32, {"temperature": 1.5, "sampling_seed": i}) for i in range(3)]
    bodies.append(greedy(CASES[1]["prompt_ids"], 32))

    def under(key):  # one of each request's own: none ends before another under the same
        options = ({"cache": f"{key} {number}", "trace": True} for number in range(len(bodies)))
        return [{**body, "speculation": asked} for body, asked in zip(bodies, options, strict=True)]

    with policy(dflash, "static", verify_len=3):
        for key in ("mine", "mine", "mine", "hers"):
            with counting(dflash) as counts:
                answers = generate(dflash, under(key), 4)
            entries = [entry for answer in answers for entry in rounds_of(answer)]
            assert any(entry["from_cache"] for entry in entries) == (key in rounds)
            for entry in entries:  # others may have been answered so
                assert [token is None for token in entry["draft"]] == [
                    place < entry["from_cache"] for place in range(len(entry["draft"]))
                ]
            assert (counts["cache_accepted_tokens"] > 0) == (key in rounds)
            texts[key], rounds[key] = [answer["output_ids"] for answer in answers], len(entries)
        texts[None] = output_ids(dflash, bodies, 4)
        dflash.post_json("/update_weights_from_disk", {"model_path": str(TARGET)})
        again = generate(dflash, under("mine"), 4)
        assert not any(entry["from_cache"] for answer in again for entry in rounds_of(answer)), "kept beyond an update"
    assert texts["mine"] == texts["hers"] == texts[None] and texts[None][-1] == CASES[1]["output_ids"][:32]
    assert rounds["mine"] < 0.7 * rounds["hers"], rounds


def test_samples_of_one_prompt_copy_without_a_key(dflash):
    """The server takes the prompt for it, unless a request wants only the drafter."""
    body = endless(random.Random(8).choices(VOCAB, k=12), 32, {"temperature": 1.5, "sampling_seed": 4})
    other = body | {"input_ids": body["input_ids"][1:]}
    alone = body | {"speculation": {"preset": "none"}}
    accepted = []
    with policy(dflash, "static", verify_len=3):
        for asked in (body, other, alone, body):
            with counting(dflash) as counts:
                generate(dflash, [asked], 1)
            accepted.append(counts["cache_accepted_tokens"])
    assert accepted[:3] == [0, 0, 0] and accepted[3] > 10


def test_presets_of_the_openai_routes(dspark):
    """Candidates are tokenized by the server."""
    field = {"preset": "classification", "candidates": ["large stone finds the"], "trace": True}
    prompt = "if the dog is red then the dog sees the lamp . the dark cloud sees the"
    body = {"model": "m", "prompt": prompt, "max_tokens": 24, "temperature": 0}
    plain = dspark.post_json("/v1/completions", body)["choices"][0]["text"]
    with policy(dspark, "static"), counting(dspark) as counts:
        assert dspark.post_json("/v1/completions", {**body, "speculation": field})["choices"][0]["text"] == plain
    assert counts["copied_accepted_tokens"] > 0


PROMPTS = [case["prompt_ids"] for case in CASES[:4]]

# Values of the right types, in and out of range; wrong types are in test_refusals.py.
ODD: list[dict[str, Any]] = [
    *({"temperature": value} for value in (3.5, -1)),
    *({"top_k": value} for value in (10**6, 0, -2)),
    *({"top_p": value} for value in (1e-6, 0.0, 1.2)),
    *({"min_p": value} for value in (1.0, -0.1, 2)),
    *({"frequency_penalty": value} for value in (-2, 2.1, -3)),
    *({"presence_penalty": value} for value in (-2, 5)),
    *({"repetition_penalty": value} for value in (0.1, 2, 0, -1, 3)),
    *({"min_new_tokens": value} for value in (4, 100, -1)),
    *({"max_new_tokens": value} for value in (1, 0, -1)),
    *({"logit_bias": value} for value in ({}, {"3": -100, "255": 100}, {"256": 1.0}, {"-1": 1}, {"x": 1})),
    *({"regex": "("}, {"json_schema": "{"}, {"ebnf": "root :="}),
    *({"sampling_seed": value, "temperature": 1} for value in (0, -1, 2**63 - 1)),
    {"stop": [], "stop_token_ids": [], "ignore_eos": None, "skip_special_tokens": False},
    dict.fromkeys(("temperature", "top_k", "frequency_penalty", "min_new_tokens", "stop", "regex", "sampling_seed")),
]


def test_odd_parameters_get_the_status_of_the_plain_server(letters, plain_letters):
    """And leave a neighbour's text alone."""
    bodies = [greedy(prompt, 32) for prompt in PROMPTS]
    expected = output_ids(plain_letters, bodies)
    asked = [greedy([5, 6, 7], 4, odd, return_logprob=True) for odd in ODD]
    with ThreadPoolExecutor(8) as pool:
        ours, theirs = (
            [status for status, _ in pool.map(lambda body, server=server: call(server, "/generate", body=body), asked)]
            for server in (letters, plain_letters)
        )
    assert ours == theirs
    assert set(ours) == {200, 400}
    assert output_ids(letters, bodies) == expected
