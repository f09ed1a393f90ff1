"""The sampling rules for one request, in plain Python numbers: what the batched references are compared with."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from dspark_kernels import Adjustment, Purpose, RoundKeys, SamplingBatch, exponential, uniform


@dataclass(frozen=True)
class Request:
    """Sampling parameters and noise keys of one request."""

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    key: int = 0
    position: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1


def batch_of(requests: list[Request], seed: int, step: Any, device: Any = "cpu") -> tuple[SamplingBatch, RoundKeys]:
    names = "temperature top_k top_p min_p seed".split()
    rows = SamplingBatch.from_lists(*([getattr(r, name) for r in requests] for name in names), device)
    keys, positions = (
        torch.tensor([getattr(r, name) for r in requests], device=device) for name in ("key", "position")
    )
    return rows, RoundKeys(seed, step, keys, positions)


def literal_distribution(logits: torch.Tensor, request: Request) -> list[float]:
    """Probabilities of one row [V] of logits."""
    scaled = [value / request.temperature for value in logits.tolist()]
    top = max(scaled)
    weights = [math.exp(value - top) for value in scaled]
    total = sum(weights)
    probs = [weight / total for weight in weights]
    order = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    kept, mass = [0.0] * len(probs), 0.0
    for rank, token in enumerate(order):
        in_top_k = request.top_k == -1 or rank < request.top_k
        in_min_p = probs[token] >= request.min_p * probs[order[0]]
        if in_top_k and mass <= request.top_p and in_min_p:
            kept[token] = probs[token]
        mass += probs[token]
    total = sum(kept)
    return [weight / total for weight in kept]


def literal_adjust(logits: Sequence[float], adjustment: Adjustment, output: Sequence[int]) -> list[float]:
    """Return one row with penalties, minimum length and biases, after ``output``, the tokens emitted before it."""
    adjusted = []
    for token, logit in enumerate(logits):
        occurrences = output.count(token)
        value = logit - adjustment.frequency * occurrences - (adjustment.presence if occurrences else 0.0)
        if token in adjustment.stop_token_ids and len(output) < adjustment.min_new_tokens:
            value = -math.inf
        if occurrences:
            value = value * adjustment.repetition if value < 0 else value / adjustment.repetition
        adjusted.append(value + adjustment.logit_bias.get(token, 0.0))
    return adjusted


def literal_inverse_cdf(weights: list[float], u: float) -> int:
    threshold = u * sum(weights)
    return next(token for token, reached in enumerate(itertools.accumulate(weights)) if reached > threshold)


def literal_choice(logits: torch.Tensor, request: Request, offset: int) -> int:
    """The one token that a greedy or seeded request may take at ``request.position + offset``."""
    if request.greedy:
        values = logits.tolist()
        return values.index(max(values))
    probs = literal_distribution(logits, request)
    noise = exponential(torch.tensor([request.seed]), torch.tensor([request.position + offset]), len(probs))[0].tolist()
    scores = [math.log(p) - math.log(e) if p > 0 else -math.inf for p, e in zip(probs, noise, strict=True)]
    return scores.index(max(scores))


def literal_draw(logits: torch.Tensor, request: Request, u: float, offset: int) -> int:
    if request.greedy or request.seed is not None:
        return literal_choice(logits, request, offset)
    return literal_inverse_cdf(literal_distribution(logits, request), u)


def literal_uniform(keys: RoundKeys, request: Request, slot: int, purpose: Purpose) -> float:
    return uniform(keys.seed, keys.step, torch.tensor([request.key]), slot, purpose).item()


def literal_accept(
    drafts: list[int],
    verify_len: int,
    logits: torch.Tensor,  # [verify_len + 1, V]
    draft_probs: list[list[float]],  # gamma rows
    request: Request,
    keys: RoundKeys,
) -> list[int]:
    """Accepted drafts, then the bonus token."""
    for i in range(verify_len):
        if request.greedy or request.seed is not None:
            choice = literal_choice(logits[i], request, i)
            if drafts[i] != choice:
                return [*drafts[:i], choice]
            continue
        target = literal_distribution(logits[i], request)
        ratio = target[drafts[i]] / draft_probs[i][drafts[i]]
        if literal_uniform(keys, request, i, Purpose.ACCEPT) >= min(1.0, ratio):
            residual = [max(t - d, 0.0) for t, d in zip(target, draft_probs[i], strict=True)]
            return [*drafts[:i], literal_inverse_cdf(residual, literal_uniform(keys, request, i, Purpose.RESIDUAL))]
    u = literal_uniform(keys, request, verify_len, Purpose.BONUS)
    return [*drafts[:verify_len], literal_draw(logits[verify_len], request, u, verify_len)]
