"""The recipe of the bundled drafter: its prompts, and what a part of them takes from the others."""

import json

import pytest

from sglang_dspark.tools.train.recipes import smollm2_135m
from sglang_dspark.tools.train.recipes.seed_prompts import MATH_ENDINGS, openings, templated

# How the sets of the evaluation ask.
WRAPPINGS = (
    "Please reason step by step, and put your final answer within \\boxed{}.",
    "Write a solution to the following problem and make sure that it passes the tests:",
)


@pytest.mark.parametrize("domain", ["math", "code", "chat"])
def test_no_prompt_wears_the_wrapping_of_the_evaluation(domain):
    found = templated(domain, 400, 1) + openings(domain, 400, 1)
    assert len(set(found)) > 100
    assert not [prompt for prompt in (*found, *MATH_ENDINGS) for wrapping in WRAPPINGS if wrapping in prompt]


def test_a_part_leaves_out_the_prompts_of_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2_135m, "_prompt_counts", lambda: {"code": (300, 0)})
    prompts = []
    for part in range(2):
        path = tmp_path / f"part-{part:03d}" / "prompts.jsonl"
        path.parent.mkdir()
        smollm2_135m.write_prompts(None, None, path, part, 1.0, print)
        prompts.append([json.loads(line)["prompt"] for line in path.read_text().splitlines()])
    assert not set(prompts[0]) & set(prompts[1])
    # Some of the second part's were in the first one.
    assert len(prompts[1]) < len(set(templated("code", 300, 1)))
