"""The exact distribution of a few sampled tokens of the golden target, by enumeration, and a test of samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import scipy.stats
import torch
from dspark_kernels import SamplingBatch, target_probs
from transformers import AutoModelForCausalLM

Tokens = tuple[int, ...]
Cell = tuple[int | None, ...]

MIN_EXPECTED = 8  # for the chi-square approximation
IMPOSSIBLE = 1e-7  # mass that float32 rounding may leave to tokens which a filter rules out


class TargetDistribution:
    """Probabilities of continuations under one set of sampling parameters."""

    def __init__(self, target: Path, prompt: Sequence[int], **parameters: float) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        self._prompt = list(prompt)
        self._parameters = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0} | parameters

    def cells(self, depth: int, min_prob: float) -> dict[Cell, float]:
        """A partition of the continuations of ``depth`` tokens into likely ones, with the probability of each cell.

        A prefix is followed token by token while its probability is at least ``min_prob``; ``(*prefix, None)`` is the
        cell of all other continuations of a prefix.
        """
        cells: dict[Cell, float] = {}
        frontier: dict[Tokens, float] = {(): 1.0}
        for _ in range(depth):
            longer: dict[Tokens, float] = {}
            for prefix, next_probs in zip(frontier, self._next_probs(list(frontier)), strict=True):
                row = next_probs * frontier[prefix]
                likely = (row >= min_prob).nonzero().flatten().tolist()
                longer |= {(*prefix, token): float(row[token]) for token in likely}
                row[likely] = 0
                cells[(*prefix, None)] = float(row.sum())
            frontier = longer
        return cells | frontier

    @torch.inference_mode()
    def _next_probs(self, prefixes: list[Tokens]) -> torch.Tensor:
        logits = self._next_logits(prefixes)
        columns = {f"{name}s": [value] * len(prefixes) for name, value in self._parameters.items()}
        rows = SamplingBatch.from_lists(**columns, seeds=[None] * len(prefixes))
        return target_probs(logits, rows.filter_params).double()

    def _next_logits(self, prefixes: list[Tokens]) -> torch.Tensor:
        logits: torch.Tensor = self._model(torch.tensor([[*self._prompt, *prefix] for prefix in prefixes])).logits
        return logits[:, -1]


def p_value(sample: Sequence[Tokens], cells: dict[Cell, float]) -> float:
    """Chi-square test of a sample against a partition; cells too rare for the test count as one."""
    num = len(sample)
    counts = Counter(_cell(tokens, cells) for tokens in sample)
    impossible = [cell for cell in counts if cells[cell] < IMPOSSIBLE]
    if impossible:
        return 0.0
    common = [cell for cell, prob in cells.items() if num * prob >= MIN_EXPECTED]
    observed = [counts[cell] for cell in common]
    expected = [num * cells[cell] for cell in common]
    rest = num - sum(expected)
    if rest >= MIN_EXPECTED:
        observed.append(num - sum(observed))
        expected.append(rest)
    scale = sum(observed) / sum(expected)
    return float(scipy.stats.chisquare(observed, [e * scale for e in expected]).pvalue)


def _cell(tokens: Tokens, cells: dict[Cell, float]) -> Cell:
    if tokens in cells:
        return tokens
    return next(cell for n in range(len(tokens), -1, -1) if (cell := (*tokens[:n], None)) in cells)
