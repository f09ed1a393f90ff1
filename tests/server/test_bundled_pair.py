"""The demo's pair: a Llama target of real size and the bundled drafter. Short form of ``benchmarks/identity.py``."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import sglang_dspark
from sglang_dspark.tools.demo import smollm2
from sglang_dspark.tools.launch import CPU_ENV, CPU_FLAGS, LaunchedServer, dspark_flags

DRAFTER = Path(sglang_dspark.__file__).parent / "drafters" / "smollm2-135m-instruct"
NEAR_TIE = 1e-4  # gap of the target's two best logits below which the shape of a batch may decide
MAX_TOKENS = 32

PROMPTS = [
    "Write a Python function that reverses a linked list.",
    "A baker sells 12 loaves in the morning and twice as many in the afternoon. How many loaves is that?",
    "Explain to a child why the moon changes its shape.",
    "Name three uses of a paper clip.",
    "Translate 'good morning' into French, German and Spanish.",
    "Write a haiku about rain.",
    "What does `git rebase` do?",
    "Summarise the story of Cinderella in two sentences.",
    "List the planets of the solar system.",
    "If a train travels 60 miles in 90 minutes, what is its speed?",
    "def quicksort(values):",
    "Give me a recipe for pancakes.",
]


@pytest.fixture(scope="module")
def target() -> Path:
    return smollm2.build(Path.home() / ".cache" / "sglang-dspark" / "smollm2-135m-instruct")


def answers(target: Path, *flags: str, passes: int = 1) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Greedy answers to PROMPTS at concurrency 8 in float32, and the counters of a DSPARK server."""
    with LaunchedServer(target, *CPU_FLAGS, "--dtype", "float32", *flags, env=CPU_ENV) as server:

        def ask(prompt: str) -> dict[str, Any]:
            text = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
            body = {"text": text, "sampling_params": {"temperature": 0, "max_new_tokens": MAX_TOKENS}}
            return dict(server.post_json("/generate", body))

        with ThreadPoolExecutor(8) as pool:
            for _ in range(passes):
                results = list(pool.map(ask, PROMPTS))
        return results, server.get_json("/dspark/stats") if flags else None


def test_text_equals_the_target_alone(target):
    expected, _ = answers(target)
    # The second pass is served from the radix cache.
    # ``static`` accepts a known share: ``auto`` may cut blocks short by step times taken on a busy machine.
    flags = (*dspark_flags(DRAFTER), "--speculative-dspark-schedule", "static")
    got, stats = answers(target, *flags, passes=2)
    assert sum(a["meta_info"]["cached_tokens"] for a in got) > 10 * len(PROMPTS)
    assert stats["accept_length"] > 1.4
    differing = [i for i, (a, b) in enumerate(zip(expected, got, strict=True)) if a["output_ids"] != b["output_ids"]]
    assert [i for i in differing if not splits_at_a_near_tie(target, expected[i], got[i], PROMPTS[i])] == []


@torch.inference_mode()
def splits_at_a_near_tie(target: Path, expected: dict[str, Any], got: dict[str, Any], prompt: str) -> bool:
    from transformers import AutoTokenizer

    text = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    pairs = list(zip(expected["output_ids"], got["output_ids"], strict=False))
    position = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if position is None:
        return False  # one text merely ends earlier
    prefix = AutoTokenizer.from_pretrained(target)(text).input_ids + expected["output_ids"][:position]
    best = (
        AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)(torch.tensor([prefix])).logits[0, -1].topk(2)
    )
    return set(pairs[position]) == set(best.indices.tolist()) and float(best.values[0] - best.values[1]) < NEAR_TIE
