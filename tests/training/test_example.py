"""The example of SmolLM2: its prompts."""

import importlib.util
import random
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "training" / "examples" / "smollm2" / "make_prompts.py"
# How the sets of the evaluation ask.
WRAPPINGS = (
    "Please reason step by step, and put your final answer within \\boxed{}.",
    "Write a solution to the following problem and make sure that it passes the tests:",
)


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("make_prompts", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_prompt_of_the_example_wears_the_wrapping_of_the_evaluation(example):
    rng = random.Random(1)
    found = [example.templated(domain, rng) for domain in example.DOMAINS for _ in range(300)] + example.openings(
        900, rng
    )
    assert len(set(found)) > 300
    assert not [prompt for prompt in found for wrapping in WRAPPINGS if wrapping in prompt]
    assert not [prompt for prompt in found if "{t" in prompt or "{stub" in prompt]
