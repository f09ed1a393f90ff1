"""Sharing between requests with the same text or labels."""

import gc

import pytest

from sglang_dspark.proposals.proposer import Proposers
from sglang_dspark.speculation import RequestOptions

SUMMARY = RequestOptions(preset="summarization")
CLASSES = RequestOptions(preset="classification", labels=((1, 2, 3), (4, 5)))


def test_samples_of_a_prompt_share_its_index():
    proposers = Proposers(256)
    first, second, other = (proposers.make(SUMMARY, prompt) for prompt in ([1, 2, 3], (1, 2, 3), [1, 2, 4]))
    assert first._prompt is second._prompt
    assert other._prompt is not first._prompt
    assert proposers.make(RequestOptions(preset="summarization", max_ngram=4), [1, 2, 3])._prompt is not first._prompt


def test_requests_with_equal_labels_share_a_trie():
    proposers = Proposers(256)
    equal = RequestOptions(preset="classification", labels=((1, 2, 3), (4, 5)))
    first, second = (proposers.make(options, [9]) for options in (CLASSES, equal))
    assert first._trie is second._trie
    first.extend([1])
    assert first.propose(9) == [2, 3]
    assert second.propose(9) == []


def test_nothing_is_kept_for_requests_that_are_gone():
    proposers = Proposers(256)
    kept = [proposers.make(SUMMARY, [1, 2, 3]), proposers.make(CLASSES, [9])]
    assert len(proposers._prompts) == len(proposers._tries) == 1
    kept.clear()
    gc.collect()
    assert len(proposers._prompts) == len(proposers._tries) == 0


def test_a_request_without_a_preset_has_no_proposer():
    with pytest.raises(ValueError, match="proposes nothing"):
        Proposers(256).make(RequestOptions(), [1])


def test_a_recorded_text_is_proposed_as_long_as_the_output_follows_it():
    text = Proposers(256).make(RequestOptions(preset="replay", recorded=(5, 6, 7, 8, 9)), [1, 2])
    assert text.propose(2) == [5, 6]
    text.extend([5, 6, 7])
    assert text.propose(7) == [8, 9]
    text.extend([8, 4])
    assert text.propose(7) == []
    text.extend([9])
    assert text.propose(7) == []


def test_an_output_that_is_longer_than_the_recorded_text_has_no_proposal():
    text = Proposers(256).make(RequestOptions(preset="replay", recorded=(5, 6)), [1])
    text.extend([5, 6])
    assert text.propose(3) == []
    text.extend([7])
    assert text.propose(3) == []
