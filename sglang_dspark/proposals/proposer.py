"""Proposers of drafts, by the name of the preset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol
from weakref import WeakValueDictionary

from sglang_dspark.proposals.candidate_labels import CandidateLabels, LabelTrie, Tokens
from sglang_dspark.proposals.ngram_lookup import NgramLookup, Prompt, as_bytes
from sglang_dspark.proposals.recorded_text import RecordedText
from sglang_dspark.speculation import CLASSIFICATION, REPLAY, SUMMARIZATION, RequestOptions


class Proposer(Protocol):
    """Propose drafts for one request from its committed tokens alone.

    That keeps sampled requests exact: the draft and its source are fixed before any noise of the step is drawn, so
    the proposal is one-hot at the draft itself.
    """

    def prepare(self, max_units: int) -> int:
        """Do up to ``max_units`` units of pending work, of about 0.3 us each; return how many there were."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens of the output."""

    def propose(self, max_tokens: int) -> list[int]:
        """Return up to ``max_tokens`` drafts for what comes next; none if the preset has no proposal."""


class Proposers:
    """Make proposers; requests with the same prompt or labels share their index.

    Args:
        vocab_size: of the target; prompts hold larger ids in the place of pictures.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
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
            return NgramLookup(self._prompt(as_bytes(prompt, self._vocab_size), options.min_ngram, options.max_ngram))
        if options.preset == CLASSIFICATION:
            return CandidateLabels(self._trie(options.labels))
        if options.preset == REPLAY:
            return RecordedText(options.recorded)
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
