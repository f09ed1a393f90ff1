"""Comparison of the texts of configurations."""

import json

import pandas as pd
import pytest
from serving.agreement import identical_texts

SWEEP = pd.DataFrame({"config": ["static", "plain"], "policy": ["static", "plain"], "dtype": "float32"})


@pytest.fixture
def compared(tmp_path):
    """``compared(answers)`` gives (config, load, load of the baseline) -> (compared, identical)."""

    def run(answers):
        (tmp_path / "requests.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in answers))
        found = identical_texts(tmp_path / "requests.jsonl", SWEEP)
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


def test_baseline_is_compared_with_itself_at_the_first_load(compared):
    answers = [answer("plain", 1, "a"), answer("plain", None, "b", rate=0.5), answer("static", None, "b", rate=0.5)]
    assert compared([*answers, answer("static", 1, "a")]) == {
        ("plain", "0.5 req/s", "1 user"): (1, 0),
        ("static", "0.5 req/s", "0.5 req/s"): (1, 1),
        ("static", "1 user", "1 user"): (1, 1),
    }
