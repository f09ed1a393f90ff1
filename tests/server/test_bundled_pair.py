"""The demo's pair: a Llama target of real size and the bundled drafter. Short form of ``benchmarks/identity.py``."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_dspark.tools.launch import LaunchedServer

NEAR_TIE = 1e-4  # gap of the target's two best logits below which the shape of a batch may decide
MAX_TOKENS = 16

PROMPTS = [
    "Write a Python function that reverses a linked list.",
    "A baker sells 12 loaves in the morning and twice as many in the afternoon. How many loaves is that?",
    "Explain to a child why the moon changes its shape.",
    "Name three uses of a paper clip.",
]


def answers(server: LaunchedServer, tokens: int = MAX_TOKENS, **fields: Any) -> list[dict[str, Any]]:
    """Return greedy answers to PROMPTS, all at once."""

    def ask(prompt: str) -> dict[str, Any]:
        body = {"text": chat(prompt), "sampling_params": {"temperature": 0, "max_new_tokens": tokens}, **fields}
        return dict(server.post_json("/generate", body))

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(ask, PROMPTS))


def chat(prompt: str) -> str:
    return f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.thorough
def test_every_token_is_the_targets_choice(smollm2):
    """Transformers is the judge, with other batch shapes; the second pass is served from the radix cache."""
    path = smollm2.get_json("/dspark/capabilities")["target"]["path"]
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        AutoTokenizer.from_pretrained(path),
    )
    # ``static`` accepts a known share: ``auto`` may cut blocks short by step times taken on a busy machine.
    first, second = answers(smollm2), answers(smollm2)
    assert sum(answer["meta_info"]["cached_tokens"] for answer in second) > 10 * len(PROMPTS)
    assert smollm2.get_json("/dspark/stats")["accept_length"] > 1.4
    answered = zip(PROMPTS * 2, [*first, *second], strict=True)
    for prompt, *text in {(prompt, *answer["output_ids"]) for prompt, answer in answered}:  # mostly once each
        assert len(text) > 8
        assert largest_gap(model, tokenizer(chat(prompt)).input_ids, text) < NEAR_TIE


@pytest.mark.thorough
def test_a_drafter_in_four_bits(smollm2, smollm2_int4):
    """The text is the same, and about as many drafts are accepted as before the drafter was quantised."""
    texts, lengths = [], []
    for server in (smollm2, smollm2_int4):
        found = answers(server, 3 * MAX_TOKENS, speculation={"preset": "none"})  # the drafter's drafts alone
        texts.append([answer["output_ids"] for answer in found])
        counts = [answer["meta_info"] for answer in found]
        steps = sum(count["spec_verify_ct"] for count in counts)
        lengths.append(sum(count["completion_tokens"] for count in counts) / steps)
    assert texts[0] == texts[1]
    assert lengths[0] > 1.4 and 0.85 < lengths[1] / lengths[0] < 1.15


HARD = [
    "qzxv 83#jf &&k2 w0wq ptlk 9981 zzkq",
    "Переведи на русский: the cat sat on the mat.",
    "0x4f 0x1c 0x99 0xab 0x00 0x7e 0x13",
    "Nenne drei Städte in Österreich und eine in der Schweiz.",
]


@pytest.mark.thorough
def test_hard_prompts_raise_no_alarm(smollm2):
    """Noise, other languages and numbers, also sampled hot: the drafter was trained on nothing of it."""
    for temperature in (0, 1.5):
        parameters = {"temperature": temperature, "max_new_tokens": 3 * MAX_TOKENS, "ignore_eos": True}
        smollm2.post_json("/generate", {"text": [chat(prompt) for prompt in HARD], "sampling_params": parameters})
    assert smollm2.get_json("/dspark/stats")["drafter_fit"]["verdict"] == "fits"


@torch.inference_mode()
def largest_gap(model: Any, prompt: list[int], output: list[int]) -> float:
    """Return the largest gap between the best logit and that of the chosen token."""
    logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
    return float((logits.max(dim=1).values - chosen).max())
