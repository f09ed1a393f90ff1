"""Penalties, biases and grammars together, against a literal decoder and against the distribution of its text."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import xgrammar
from golden_server import CASES, TARGET, greedy, output_ids, policy
from sampled_text import ALPHA, HOT, PROMPT, sample
from target_distribution import TargetDistribution, p_value
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS = [case["prompt_ids"] for case in CASES[:2]]


class LiteralDecoder:
    """The golden target token by token, with every rule of the adjustments in float64 and a grammar of xgrammar's."""

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
            logits = [self._adjusted(token, logit, output, parameters) for token, logit in enumerate(logits)]
            if matcher is not None:
                mask = xgrammar.allocate_token_bitmask(1, len(logits))
                matcher.fill_next_token_bitmask(mask)
                allowed = [mask[0, token // 32] >> (token % 32) & 1 for token in range(len(logits))]
                logits = [logit if ok else -math.inf for logit, ok in zip(logits, allowed, strict=True)]
            output.append(max(range(len(logits)), key=logits.__getitem__))
            assert matcher is None or matcher.accept_token(output[-1])
        return output

    @staticmethod
    def _adjusted(token: int, logit: float, output: list[int], parameters: dict[str, Any]) -> float:
        occurrences = output.count(token)
        if occurrences:
            logit -= parameters.get("frequency_penalty", 0) * occurrences + parameters.get("presence_penalty", 0)
        if token == 1 and len(output) < parameters.get("min_new_tokens", 0):
            return -math.inf
        if occurrences:
            repetition = parameters.get("repetition_penalty", 1)
            logit = logit * repetition if logit < 0 else logit / repetition
        return logit + parameters.get("logit_bias", {}).get(str(token), 0)


TOGETHER: list[dict[str, Any]] = [
    {"frequency_penalty": 0.4, "presence_penalty": 0.6, "repetition_penalty": 1.3},
    {"frequency_penalty": -0.2, "repetition_penalty": 1.5, "min_new_tokens": 30, "logit_bias": {"1": 9.0, "26": 1.5}},
    {"regex": "(red|blue|cat|dog|small)+"},
    {"regex": "(red|blue|green|cat|dog|bird)+", "frequency_penalty": 0.7, "repetition_penalty": 1.2},
]


@pytest.mark.parametrize("name", ["random", pytest.param("auto", marks=pytest.mark.thorough)])
def test_everything_together_equals_a_literal_loop(dspark, name):
    """Penalties of all kinds at once, whose order the plain server leaves open, and xgrammar, which it cannot run."""
    decoder = LiteralDecoder()
    bodies = []
    for prompt in PROMPTS:
        for parameters in [{}, *TOGETHER]:
            request = greedy(prompt, 40)
            request["sampling_params"] |= parameters
            bodies.append(request)
    with policy(dspark, name):
        texts = output_ids(dspark, bodies, 6)
    for request, tokens in zip(bodies, texts, strict=True):
        parameters = {k: v for k, v in request["sampling_params"].items() if k in {key for t in TOGETHER for key in t}}
        assert tokens == decoder.text(request["input_ids"], 40, **parameters)


@pytest.mark.thorough
def test_sampled_text_under_adjustments_follows_the_distribution(dspark):
    """The first two tokens of many samples, against the distribution of the target after a literal adjustment."""
    decoder, num, depth = LiteralDecoder(), 2048, 3
    parameters = {"temperature": HOT, "frequency_penalty": 1.5, "repetition_penalty": 1.4, "logit_bias": {"39": 8.0}}
    with policy(dspark, "random"):
        drawn = sample(dspark, parameters, num, depth)
    cells = PenalisedDistribution(TARGET, PROMPT, decoder, parameters).cells(depth, min_prob=10 / num)
    assert len(cells) > 20
    assert p_value(drawn, cells) > ALPHA
    unpenalised = {"temperature": HOT, "logit_bias": {"39": 8.0}}
    assert (
        p_value(drawn, PenalisedDistribution(TARGET, PROMPT, decoder, unpenalised).cells(depth, min_prob=10 / num))
        < ALPHA
    )


class PenalisedDistribution(TargetDistribution):
    """The distribution of continuations under adjustments."""

    def __init__(self, target: Path, prompt: list[int], decoder: LiteralDecoder, parameters: dict[str, Any]) -> None:
        super().__init__(target, prompt, temperature=parameters["temperature"])
        self._decoder, self._adjustments = decoder, parameters

    def _next_logits(self, prefixes: list[tuple[int, ...]]) -> torch.Tensor:
        rows = super()._next_logits(prefixes).tolist()
        return torch.tensor(
            [
                [self._decoder._adjusted(t, logit, list(prefix), self._adjustments) for t, logit in enumerate(row)]
                for prefix, row in zip(prefixes, rows, strict=True)
            ]
        )


def test_seeded_text_under_adjustments_does_not_depend_on_policy_or_load(dspark):
    bodies = []
    for i, prompt in enumerate(PROMPTS * 6):
        request = greedy(prompt, 24)
        request["sampling_params"] |= {"temperature": 1.5, "sampling_seed": i, "frequency_penalty": 0.5}
        if i % 2:
            request["sampling_params"]["regex"] = "(red|blue|cat|dog|small)+"
        bodies.append(request)
    texts = []
    for name, concurrency in (("off", 1), ("random", 8), ("auto", 4)):
        with policy(dspark, name):
            texts.append(output_ids(dspark, bodies, concurrency))
    assert texts[0] == texts[1] == texts[2]
    assert len({tuple(text) for text in texts[0]}) > 8


def test_requests_with_features_are_drafted_too(dspark):
    """Nothing falls back to plain decoding."""
    request = greedy(PROMPTS[0], 60)
    request["sampling_params"] |= {"frequency_penalty": 0.01, "regex": ".*"}
    before = dspark.get_json("/dspark/stats")
    with policy(dspark, "static"):
        output_ids(dspark, [request])
        after = dspark.get_json("/dspark/stats")
    rounds, accepted = (after[key] - before[key] for key in ("rounds", "accepted_tokens"))
    assert 0 < rounds < 60
    assert accepted > rounds
