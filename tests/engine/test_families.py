"""Every family of targets in SGLang's own model: hidden states and greedy texts are what transformers says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from family_targets import GEMMA4_EXPERTS, NUM_TOKENS, PROMPTS, TINY, continued, outputs_of, write_target
from server_pool import ON_GPU
from target_probe import TAPS, Text, ask

from sglang_dspark.draft.families import FAMILIES

# One of a kind: a dense target, experts, windows with sinks, two K/V pools, positions of three coordinates and states;
# both methods that return hidden states.
QUICK = (
    *("LlamaForCausalLM", "Qwen2MoeForCausalLM", "GptOssForCausalLM", "Gemma4ForConditionalGeneration"),
    *("Qwen2_5_VLForConditionalGeneration", "Qwen3_5ForCausalLM"),
)
ATOL = 2e-3  # of values of some tens; a neighbouring layer differs by ones


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="tests/gpu/test_families.py asks the same of a GPU, which rounds to 16 bits")
@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(name, marks=[] if name in QUICK else [pytest.mark.thorough])
        for name in (*(family.architecture for family in FAMILIES), GEMMA4_EXPERTS)
    ],
)
def test_states_and_greedy_texts(architecture, tmp_path):
    chosen = TINY[architecture].chosen
    model = write_target(architecture, tmp_path)
    with router_margins(model, chosen) as margins:
        texts = [Text(continued(model, prompt, NUM_TOKENS), len(prompt)) for prompt in PROMPTS]
    assert bool(margins) == bool(chosen)
    assert min(margins, default=1.0) > 1e-4, "experts are close: take another seed"
    assert len({tuple(text.ids[-NUM_TOKENS:]) for text in texts}) == len(texts)

    for text, answer in zip(texts, ask(tmp_path, texts), strict=True):
        logits, states = outputs_of(model, text.ids)
        best = logits.topk(2).values[text.prompt_len - 1 : -1]
        assert float((best[:, 0] - best[:, 1]).min()) > 5 * ATOL, "tokens are close: take another seed"
        expected = torch.cat([states[tap + 1] for tap in TAPS], dim=-1)
        torch.testing.assert_close(answer.features, expected[:-1], atol=ATOL, rtol=1e-4)
        assert answer.logits.argmax(-1).tolist() == text.ids[text.prompt_len :]


@contextmanager
def router_margins(model: Any, chosen: int) -> Iterator[list[float]]:
    """Collect, for every router and forward, how far the last expert that is chosen stands above the first that is not.

    In the scores by which the experts are chosen, before a softmax.
    """
    margins: list[float] = []

    def note(module: Any, args: Any, output: Any) -> None:
        rows = args[0].view(-1, module.weight.shape[1])
        scores = torch.nn.functional.linear(rows, module.weight, getattr(module, "bias", None))
        bias = getattr(module, "e_score_correction_bias", None)
        scores = scores if bias is None else scores.sigmoid() + bias
        best = scores.sort(-1, descending=True).values
        margins.append(float((best[:, chosen - 1] - best[:, chosen]).min()))

    names = ("mlp.gate", "mlp.router", "router.proj")
    routers = [module for name, module in model.named_modules() if name.endswith(names)]
    hooks = [router.register_forward_hook(note) for router in routers]
    try:
        yield margins
    finally:
        for hook in hooks:
            hook.remove()
