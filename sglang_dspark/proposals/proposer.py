"""Presets by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol
from weakref import WeakValueDictionary

from sglang_dspark.proposals.candidate_labels import CandidateLabels, LabelTrie, Tokens
from sglang_dspark.proposals.ngram_lookup import NgramLookup, Prompt, as_bytes
from sglang_dspark.speculation import CLASSIFICATION, SUMMARIZATION, RequestOptions


class Proposer(Protocol):
    """Proposes drafts for one request from its committed tokens alone.

    That keeps sampled requests exact: where a draft comes from, and what it is, is fixed before any noise of its step
    is drawn, so its proposal is one-hot at the draft itself.
    """

    def prepare(self, most: int) -> int:
        """Do up to ``most`` units of work that is not done yet, of about 0.3 us each; how many it were."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens of the output."""

    def propose(self, most: int) -> list[int]:
        """Return up to ``most`` drafts for what comes next; none if the preset has no proposal."""


class Proposers:
    """Makes proposers. What several requests have in common, as samples of one prompt do, they share."""

    def __init__(self) -> None:
        self._prompts: WeakValueDictionary[tuple[bytes, int, int], Prompt] = WeakValueDictionary()
        self._tries: WeakValueDictionary[tuple[Tokens, ...], LabelTrie] = WeakValueDictionary()

    def make(self, options: RequestOptions, prompt: Sequence[int]) -> Proposer:
        """Return the proposer of a request.

        Args:
            options: with a preset.
            prompt: its tokens.

        Raises:
            ValueError: the options name no preset.
        """
        if options.preset == SUMMARIZATION:
            return NgramLookup(self._prompt(as_bytes(prompt), options.min_ngram, options.max_ngram))
        if options.preset == CLASSIFICATION:
            return CandidateLabels(self._trie(options.labels))
        raise ValueError(f"the preset {options.preset!r} proposes nothing")

    def _prompt(self, tokens: bytes, min_ngram: int, max_ngram: int) -> Prompt:
        key = tokens, min_ngram, max_ngram
        prompt = self._prompts.get(key)
        if prompt is None:
            prompt = self._prompts[key] = Prompt(*key)
        return prompt

    def _trie(self, labels: tuple[Tokens, ...]) -> LabelTrie:
        trie = self._tries.get(labels)
        if trie is None:
            trie = self._tries[labels] = LabelTrie(labels)
        return trie
