"""The real heads of a draft model, with random weights.

Rounds of a head whose distribution is known.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from canonical_drafter import config_json
from dspark_kernels import ConfidenceWeights, DraftHeads, DraftVocabulary

from sglang_dspark.draft.formats import read_content
from sglang_dspark.draft.heads import ConfidenceHead, MarkovHead, build_markov_head
from sglang_dspark.draft.reduced_vocabulary import markov_weights
from sglang_dspark.scheduling.sts import Floats, Ints, ece, prefix_survival, sigmoid, survived


def draft_heads(
    head_type: str | None,
    *,
    vocab_size: int,
    hidden_size: int,
    block_size: int,
    rank: int = 5,
    confidence_with_markov: bool = True,
    std: float = 0.8,
    seed: int = 0,
) -> tuple[MarkovHead | None, ConfidenceHead]:
    sizes = {"vocab_size": vocab_size, "hidden_size": hidden_size, "block_size": block_size, "mask_token_id": 0}
    markov = {"markov_rank": rank if head_type else 0, "markov_head_type": head_type or ...}
    selector = {"selector_top_k": 3} if head_type == "selector" else {}
    content = config_json(**sizes, **markov, **selector, confidence_head_with_markov=confidence_with_markov)
    config = read_content(content, origin="").config
    heads = build_markov_head(config), ConfidenceHead(config)
    generator = torch.Generator().manual_seed(seed)
    for head in heads:
        for parameter in head.parameters() if head is not None else ():
            parameter.data.normal_(std=std, generator=generator)
    return heads


def as_weights(
    markov: MarkovHead | None,
    confidence: ConfidenceHead | None,
    vocabulary: DraftVocabulary | None = None,
    shortlist: int | None = None,
) -> DraftHeads:
    """The tensors of modules, W2 over the tokens of ``vocabulary``."""
    weights = markov_weights(markov, lambda rows: rows if vocabulary is None else rows[vocabulary.token_ids])
    proj = None if confidence is None else confidence.proj
    confidence = None if proj is None else ConfidenceWeights(proj.weight[0], proj.bias)
    return DraftHeads(weights, confidence, vocabulary, shortlist)


GAMMA = 7

DISTORTIONS: dict[str, Callable[[Floats], Floats]] = {
    "none": lambda z: z,
    "times 3": lambda z: 3 * z,
    "a third": lambda z: z / 3,
    "minus 3": lambda z: z - 3,
}


def draw_rounds(rng: np.random.Generator, num_rounds: int, gamma: int = GAMMA) -> tuple[Floats, Ints]:
    """Logits [n, gamma] of a perfectly calibrated head, and accepted counts [n] drawn by them."""
    logits = rng.normal(1.5, 1.5, (num_rounds, gamma))
    kept = rng.random((num_rounds, gamma)) < sigmoid(logits)
    return logits, np.cumprod(kept, axis=1).sum(axis=1)


def survival_eces(logits: Floats, accepted: Ints) -> list[float]:
    """ECE of prefix survival by position."""
    survival, outcomes = prefix_survival(sigmoid(logits)), survived(accepted, logits.shape[1])
    return [ece(predicted, outcome) for predicted, outcome in zip(survival.T, outcomes.T, strict=True)]
