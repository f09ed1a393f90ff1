"""The exact law of a few sampled tokens of the golden target, by enumeration, and the test of a sample against it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import scipy.stats
import torch
from dspark_kernels import SamplingRows, target_probs
from transformers import AutoModelForCausalLM

Tokens = tuple[int, ...]


class TargetLaw:
    """Probabilities of continuations under one set of sampling parameters."""

    def __init__(self, target: Path, prompt: Sequence[int], **parameters: float) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        self._prompt = list(prompt)
        self._parameters = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0} | parameters

    def likely(self, depth: int, min_prob: float) -> dict[Tokens, float]:
        """All continuations of ``depth`` tokens with at least ``min_prob``, and their probabilities."""
        cells: dict[Tokens, float] = {(): 1.0}
        for _ in range(depth):
            longer = {}
            for prefix, row in zip(cells, self._next_probs(list(cells)), strict=True):
                for token in (row * cells[prefix] >= min_prob).nonzero().flatten().tolist():
                    longer[(*prefix, token)] = cells[prefix] * float(row[token])
            cells = longer
        return cells

    @torch.inference_mode()
    def _next_probs(self, prefixes: list[Tokens]) -> torch.Tensor:
        logits = self._model(torch.tensor([[*self._prompt, *prefix] for prefix in prefixes])).logits[:, -1]
        columns = {f"{name}s": [value] * len(prefixes) for name, value in self._parameters.items()}
        rows = SamplingRows.from_lists(**columns, seeds=[None] * len(prefixes))
        return target_probs(logits, rows.law).double()


def p_value(sample: Sequence[Tokens], law: dict[Tokens, float]) -> float:
    """Chi-square test of a sample against the law; whatever the law does not list is one more cell."""
    num = len(sample)
    counts = Counter(sample)
    observed = [counts[cell] for cell in law]
    expected = [num * prob for prob in law.values()]
    rest = num - sum(expected)
    if rest >= 1:
        observed.append(num - sum(observed))
        expected.append(rest)
    elif num > sum(observed):
        return 0.0  # tokens that the law rules out
    total = sum(expected)
    return float(scipy.stats.chisquare(observed, [e * num / total for e in expected]).pvalue)
