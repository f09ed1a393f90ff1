"""A text ends as if the several tokens of a step had come one by one."""

from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_dspark.engine.answers import Ends, let_first_end_count

LETTERS = "abcdefgh"  # of tokens 0 to 7
EOS = 7
TOKENIZER = SimpleNamespace(
    decode=lambda ids: "".join(LETTERS[i] for i in ids),
    encode=lambda text, **_: [LETTERS.index(letter) for letter in text],
    eos_token_id=EOS,
    additional_stop_token_ids=None,
)


class Grammar:
    """Complete after so many tokens, all of which it has read."""

    def __init__(self, length):
        self.length, self.seen = length, 0

    def read(self, tokens):
        """Those of ``tokens`` that still belong to it."""
        read = tokens[: self.length - self.seen]
        self.seen += len(read)
        return read

    def is_terminated(self):
        return self.seen >= self.length


def request(max_new_tokens, grammar_length, **stops):
    parameters = SamplingParams(max_new_tokens=max_new_tokens, **stops)
    parameters.normalize(TOKENIZER)
    req = Req("r", "", [0], parameters, vocab_size=len(LETTERS))
    req.tokenizer = TOKENIZER
    req.grammar = None if grammar_length is None else Grammar(grammar_length)
    return req


def end(req, runs, look=lambda reqs, runs: None, aborted=None):
    """Return the text that comes in ``runs`` as it is served, and why it ended.

    Args:
        look: called before each run.
        aborted: the run that is under way when the request is aborted.
    """
    for number, tokens in enumerate(runs):
        if number == aborted:
            req.to_finish = FINISH_ABORT()
        run = tokens if req.grammar is None else req.grammar.read(tokens)
        look([req], [run])
        req.output_ids.extend(run)
        before = len(req.output_ids)
        req.update_finish_state(len(run))
        assert len(req.output_ids) == before
        if req.finished():
            return list(req.output_ids_through_stop), req.finished_reason.to_json()
    return list(req.output_ids), None


@settings(max_examples=500)
@given(
    runs=st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=6), min_size=1, max_size=4),
    max_new_tokens=st.integers(1, 20),
    grammar_length=st.none() | st.integers(1, 12),
    stop_token_ids=st.lists(st.integers(0, 7), max_size=2),
    stop=st.lists(st.text(LETTERS, min_size=1, max_size=3), max_size=2),
    stop_regex=st.sampled_from([[], ["b$"], ["[cd]e"], ["^a"]]),
)
@example([[1, EOS, 2]], 3, None, [], [], [])
@example([[EOS, 1, 2]], 9, None, [], ["bc"], [])
@example([[1, 2]], 9, None, [], [], ["b$"])
@example([[1, 2, 3]], 9, 3, [1], [], [])
@example([[1, 2, 3]], 9, 3, [], ["bcd"], [])
@example([[1, 2, 3]], 9, None, [], ["cd", "bc"], [])
def test_the_first_end_counts(runs, max_new_tokens, grammar_length, stop_token_ids, stop, stop_regex):
    wanted = {"stop_token_ids": stop_token_ids, "stop": stop, "stop_regex": stop_regex}
    one_by_one = [[token] for run in runs for token in run]
    expected = end(request(max_new_tokens, grammar_length, **wanted), one_by_one)
    assert end(request(max_new_tokens, grammar_length, **wanted), runs, let_first_end_count) == expected


@given(
    before=st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=4), max_size=3),
    run=st.lists(st.integers(0, 7), min_size=1, max_size=8),
    max_new_tokens=st.integers(1, 12),
    stops=st.sampled_from([{}, {"stop": ["b"]}, {"stop_regex": ["b$"]}, {"stop_token_ids": [2]}]),
)
@example([[1, 3, 4]], [3, 3, 3, 3], 5, {})
@example([[3]], [3, 1, 3], 9, {"stop": ["b"]})
@example([[3]], [3, EOS, 3], 9, {})
def test_an_abort_passes_no_other_end(before, run, max_new_tokens, stops):
    whole, one_by_one = request(max_new_tokens, None, **stops), request(max_new_tokens, None, **stops)
    tokens = [[token] for one in [*before, run] for token in one]
    expected = end(one_by_one, tokens, aborted=len(tokens) - len(run))
    assert end(whole, [*before, run], let_first_end_count, aborted=len(before)) == expected


def test_requests_whose_tokens_are_dropped_are_left_alone():
    """Under overlap a request that has ended takes part in one more step. What holds itself is freed late."""
    ended, retracted, running = (request(3, None, stop=["a"]) for _ in range(3))
    ended.finished_reason, retracted.is_retracted = "of some kind", True
    let_first_end_count([ended, retracted, running], [[1] * 3] * 3)
    assert ["update_finish_state" in vars(req) for req in (ended, retracted, running)] == [False, False, True]


def test_requests_without_stop_strings_are_left_to_sglang():
    reqs = [request(9, 5, stop_token_ids=[3]), request(9, None), *(request(9, None, stop=["ab"]) for _ in range(2))]
    let_first_end_count(reqs, [[1] * 8, [1] * 9, [1], [1, 2]])
    assert ["update_finish_state" in vars(req) for req in reqs] == [False, False, False, True]


@pytest.mark.parametrize(("counted", "expected"), [(3, 3), (4, 4), (9, 4)])
def test_reasoning_has_at_most_the_tokens_of_the_text(counted, expected):
    req = request(9, None)
    req.output_ids.extend([5] * 4)
    req.reasoning_tokens = counted
    Ends().request_ended(req)
    assert req.reasoning_tokens == expected
