"""Comparison of the texts of configurations."""

import json

import pytest
from serving.agreement import identical_texts

BASELINES = {"plain": "plain", "static": "plain"}


@pytest.fixture
def compared(tmp_path):
    """``compared(answers)`` gives (config, load, load of the baseline) -> (compared, identical)."""

    def run(answers):
        (tmp_path / "requests.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in answers))
        found = identical_texts(tmp_path / "requests.jsonl", BASELINES)
        assert {one["baseline"] for one in found} <= {"plain"}
        return {
            (one["config"], one["load"], one["baseline_load"]): (one["compared"], one["identical"]) for one in found
        }

    return run


def answer(config, users, text, *, slot=0, round=0, prompt_index=None, rate=None):
    place = {"config": config, "concurrency": users, "rate": rate, "round": round, "slot": slot}
    return place | {"prompt_index": 10 + slot if prompt_index is None else prompt_index, "text": text}


def test_texts_are_compared_prompt_by_prompt(compared):
    answers = [
        *(answer("plain", 1, "the same"), answer("plain", 1, "a cat sat", slot=1), answer("plain", 1, "12", slot=2)),
        *(answer("static", 1, "the same"), answer("static", 1, "a car ran", slot=1), answer("static", 1, "12", slot=2)),
    ]
    assert compared(answers) == {("static", "1 user", "1 user"): (3, 2)}


def test_texts_at_two_loads_are_compared_by_prompt(compared):
    # More users ask more prompts per round, so the same slot of round 1 has another prompt.
    few = [answer("plain", 1, f"text {n}", prompt_index=n, round=n // 2, slot=n % 2) for n in range(4)]
    many = [answer("plain", 4, f"text {n}", prompt_index=n, round=n // 4, slot=n % 4) for n in range(8)]
    assert compared([*few, *many]) == {("plain", "4 users", "1 user"): (4, 4)}


def test_a_prompt_that_comes_again_is_compared_every_time(compared):
    expected = [answer("plain", 1, "a", round=index, prompt_index=5) for index in range(3)]
    found = [answer("static", 1, "ab"[index == 2], round=index, prompt_index=5) for index in range(3)]
    assert compared([*expected, *found]) == {("static", "1 user", "1 user"): (3, 2)}


def test_baseline_is_compared_with_itself_at_the_first_load(compared):
    answers = [answer("plain", 1, "a"), answer("plain", None, "b", rate=0.5), answer("static", None, "b", rate=0.5)]
    assert compared([*answers, answer("static", 1, "a")]) == {
        ("plain", "0.5 req/s", "1 user"): (1, 0),
        ("static", "0.5 req/s", "0.5 req/s"): (1, 1),
        ("static", "1 user", "1 user"): (1, 1),
    }


def test_answers_without_partner_are_not_counted(compared):
    assert compared([answer("plain", 1, "a"), answer("static", 1, "a", slot=1)]) == {}
