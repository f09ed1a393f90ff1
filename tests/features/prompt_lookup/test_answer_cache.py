"""Answers by key: how much is kept of them, in which order, and for which requests."""

import pytest
import torch
from settled_requests import settled
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH

from sglang_dspark.features.prompt_lookup import PromptLookup
from sglang_dspark.features.prompt_lookup.rules import MOST_TOKENS, AnswerCache, ForcedTokens
from sglang_dspark.worker.worker import DSparkWorker

ROOM = 10**6


def read(cache, key):
    return cache.read(key).tolist()


def test_answers_of_a_key_are_read_newest_first_and_those_of_others_never():
    cache = AnswerCache(ROOM)
    assert read(cache, "a") == []
    cache.keep("a", [1, 2, 3])
    cache.keep("b", [7])
    cache.keep("a", [4, 5])
    assert read(cache, "a") == [-1, 4, 5, -1, 1, 2, 3]
    assert read(cache, "b") == [-1, 7]
    assert read(cache, "") == read(cache, "A") == []


@pytest.mark.parametrize("longer", [0, 1, MOST_TOKENS])
def test_a_key_has_a_bounded_number_of_tokens_of_which_the_newest_stay(longer):
    cache = AnswerCache(ROOM)
    cache.keep("a", [1] * 10)
    cache.keep("a", [2] * (MOST_TOKENS - 4 + longer))
    text = read(cache, "a")
    assert text[:-3] == [-1, *[2] * (MOST_TOKENS - 4)] and len(text) == MOST_TOKENS
    assert text[-3:] == {0: [-1, 1, 1], 1: [2, -1, 1]}.get(longer, [2, 2, 2])


def test_what_was_read_stays_as_it_was():
    cache = AnswerCache(ROOM)
    cache.keep("a", [1, 2])
    text = cache.read("a")
    cache.keep("a", [3] * MOST_TOKENS)
    assert text.tolist() == [-1, 1, 2]


def test_keys_that_were_not_used_for_longest_go_first():
    cache = AnswerCache(100_000)
    for key in "abc":
        cache.keep(key, [1] * MOST_TOKENS)
    cache.read("a")
    cache.keep("d", [2] * MOST_TOKENS)
    assert [bool(read(cache, key)) for key in "abcd"] == [True, False, True, True]
    cache.keep("c", [3])
    cache.keep("e", [4] * MOST_TOKENS)
    assert [bool(read(cache, key)) for key in "acde"] == [False, True, True, True]


def test_bytes_are_bounded_whatever_is_kept():
    """Keys count as well as tokens, and a key whose answers are replaced counts once."""
    cache = AnswerCache(50_000)
    for number in range(2000):
        cache.keep(f"{number % 700}" * 60, [number] * (number % 90))
        assert cache.num_bytes <= 50_000
    assert cache.num_bytes > 40_000
    kept = cache._texts
    assert cache.num_bytes > sum(text.nbytes + len(key) for key, text in kept.items()) + 200 * len(kept)
    cache.clear()
    assert cache.num_bytes == 0 and not kept


def test_nothing_is_kept_without_room():
    cache = AnswerCache(0)
    cache.keep("a", [1])
    assert read(cache, "a") == [] and cache.num_bytes == 0


@pytest.mark.parametrize(
    ("key", "reason", "kept"),
    [("a", FINISH_LENGTH(3), [-1, 5, 6, 7]), ("", FINISH_LENGTH(3), []), ("a", FINISH_ABORT(), [])],
    ids=["key", "no key", "aborted"],
)
def test_answers_are_kept_of_requests_with_a_key_that_end_by_themselves(key, reason, kept):
    worker = object.__new__(DSparkWorker)
    answers = AnswerCache(ROOM)
    worker.candidates = PromptLookup(answers, ForcedTokens(None, 1, 1), torch.device("cpu"))
    worker.parts = [worker.candidates]
    req = settled({"cache": key} if key else {}, answer_cache=1)
    req.output_ids.extend([5, 6, 7])
    req.finished_reason = reason
    worker.end_request(req)
    assert read(answers, key) == kept
    worker.clear_cache_pool()
    assert read(answers, key) == []


@pytest.mark.parametrize("event", [PromptLookup.flushed, PromptLookup.weights_changed], ids=["flush", "new weights"])
def test_answers_from_before_are_forgotten(event):
    answers = AnswerCache(ROOM)
    answers.keep("a", [5])
    event(PromptLookup(answers, ForcedTokens(None, 1, 1), torch.device("cpu")))
    assert read(answers, "a") == []
