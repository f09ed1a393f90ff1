"""Penalties, biases and grammars together, against a literal decoder. Distributions: tests/exactness."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import xgrammar
from dspark_kernels import Adjustment
from golden_server import CASES, TARGET, counting, greedy, output_ids, policy
from literal import literal_adjust
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS = [case["prompt_ids"] for case in CASES[:2]]


class LiteralDecoder:
    """Decodes with the golden target token by token, literal adjustments and a grammar of xgrammar's."""

    def __init__(self) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(TARGET)
        self._tokens = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=256, stop_token_ids=[1])

    @torch.inference_mode()
    def text(self, prompt: list[int], num_tokens: int, **parameters: Any) -> list[int]:
        matcher = None
        if "regex" in parameters:
            compiled = xgrammar.GrammarCompiler(self._tokens).compile_regex(parameters["regex"])
            matcher = xgrammar.GrammarMatcher(compiled)
        output: list[int] = []
        while len(output) < num_tokens and (not output or output[-1] != 1):
            logits = self._model(torch.tensor([[*prompt, *output]])).logits[0, -1].double().tolist()
            logits = literal_adjust(logits, adjustment(parameters), output)
            if matcher is not None:
                mask = xgrammar.allocate_token_bitmask(1, len(logits))
                matcher.fill_next_token_bitmask(mask)
                allowed = [mask[0, token // 32] >> (token % 32) & 1 for token in range(len(logits))]
                logits = [logit if ok else -math.inf for logit, ok in zip(logits, allowed, strict=True)]
            output.append(max(range(len(logits)), key=logits.__getitem__))
            assert matcher is None or matcher.accept_token(output[-1])
        return output


def adjustment(parameters: dict[str, Any]) -> Adjustment:
    """Return the adjustment that these sampling parameters ask for."""
    return Adjustment(
        frequency=parameters.get("frequency_penalty", 0),
        presence=parameters.get("presence_penalty", 0),
        repetition=parameters.get("repetition_penalty", 1),
        min_new_tokens=parameters.get("min_new_tokens", 0),
        stop_token_ids=(1,),
        logit_bias={int(token): bias for token, bias in parameters.get("logit_bias", {}).items()},
    )


TOGETHER: list[dict[str, Any]] = [
    {"frequency_penalty": 0.4, "presence_penalty": 0.6, "repetition_penalty": 1.3},
    {"frequency_penalty": -0.2, "repetition_penalty": 1.5, "min_new_tokens": 30, "logit_bias": {"1": 9.0, "26": 1.5}},
    {"regex": "(red|blue|cat|dog|small)+"},
    {"regex": "(red|blue|green|cat|dog|bird)+", "frequency_penalty": 0.7, "repetition_penalty": 1.2},
]


@pytest.mark.parametrize("name", ["random", pytest.param("auto", marks=pytest.mark.thorough)])
def test_everything_together_equals_a_literal_loop(dspark, name):
    """Penalties of all kinds at once, whose order the plain server leaves open, and grammars."""
    decoder = LiteralDecoder()
    bodies = [greedy(prompt, 40, parameters) for prompt in PROMPTS for parameters in ({}, *TOGETHER)]
    with policy(dspark, name):
        texts = output_ids(dspark, bodies, 6)
    for request, tokens in zip(bodies, texts, strict=True):
        parameters = {k: v for k, v in request["sampling_params"].items() if k in {key for t in TOGETHER for key in t}}
        assert tokens == decoder.text(request["input_ids"], 40, **parameters)


def test_seeded_text_under_adjustments_does_not_depend_on_policy_or_load(dspark):
    bodies = []
    for i, prompt in enumerate(PROMPTS * 4):
        regex = {"regex": "(red|blue|cat|dog|small)+"} if i % 2 else {}
        parameters = {"temperature": 1.5, "sampling_seed": i, "frequency_penalty": 0.5, **regex}
        bodies.append(greedy(prompt, 24, parameters))
    texts = []
    for name, concurrency in (("off", 1), ("random", 8), ("auto", 4)):
        with policy(dspark, name):
            texts.append(output_ids(dspark, bodies, concurrency))
    assert texts[0] == texts[1] == texts[2]
    assert len({tuple(text) for text in texts[0]}) > 5


def test_requests_with_features_are_drafted_too(dspark):
    """Nothing falls back to plain decoding."""
    with policy(dspark, "static"), counting(dspark) as counts:
        output_ids(dspark, [greedy(PROMPTS[0], 60, {"frequency_penalty": 0.01, "regex": ".*"})])
    assert 0 < counts["rounds"] < 60
    assert counts["accepted_tokens"] > counts["rounds"]
