"""Presets by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from sglang_dspark.proposals.candidate_labels import CandidateLabels, Tokens
from sglang_dspark.proposals.ngram_lookup import NgramLookup
from sglang_dspark.speculation import CLASSIFICATION, SUMMARIZATION, Speculation


class Proposer(Protocol):
    """Proposes drafts for one request from its committed tokens alone.

    That keeps sampled requests exact: where a draft comes from, and what it is, is fixed before any noise of its step
    is drawn, so its proposal is one-hot at the draft itself.
    """

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens of the output."""

    def propose(self, most: int) -> list[int]:
        """Up to ``most`` drafts for what comes next; none where the preset has nothing to say."""


def make_proposer(options: Speculation, prompt: Sequence[int], labels: Iterable[Tokens]) -> Proposer:
    """The proposer of a request.

    Args:
        options: with a preset.
        prompt: its tokens.
        labels: tokens of the candidates, for the preset classification.

    Raises:
        ValueError: the options name no preset.
    """
    if options.preset == SUMMARIZATION:
        return NgramLookup(prompt, options.min_ngram, options.max_ngram)
    if options.preset == CLASSIFICATION:
        return CandidateLabels(labels)
    raise ValueError(f"the preset {options.preset!r} proposes nothing")
