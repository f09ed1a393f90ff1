"""The ``speculation`` field from the front end's one check to what the scheduler reads."""

from types import SimpleNamespace

import pytest
import torch
from dspark_kernels import ASKED_ROWS, CACHED_ROWS, MOST_MATCH, USUAL

from sglang_dspark.config import DSparkConfig
from sglang_dspark.engine.api.request_field import ASKED, MAX_LABEL_TOKENS, settle
from sglang_dspark.engine.launch_state import DSparkServer
from sglang_dspark.engine.scheduler import request_options as module
from sglang_dspark.engine.scheduler.answer_cache import AnswerCache
from sglang_dspark.engine.scheduler.request_options import BatchOptions, request_options, with_forced
from sglang_dspark.speculation import RequestOptions
from sglang_dspark.step.limits import RequestLimits


class Tokenizer:
    """A token for each letter."""

    def __init__(self):
        self.calls = 0

    def __call__(self, texts, add_special_tokens):
        assert not add_special_tokens
        self.calls += 1
        return {"input_ids": [[ord(letter) for letter in text] for text in texts]}


def manager(tokenizer=None, answer_cache=None):
    server = DSparkServer(DSparkConfig(answer_cache=answer_cache), drafter=None, dummy_draft=False)
    model_config = SimpleNamespace(vocab_size=256)
    return SimpleNamespace(tokenizer=tokenizer, server_args=SimpleNamespace(_dspark=server), model_config=model_config)


def settled(custom_params, tokenizer=None, answer_cache=None):
    """The scheduler-side request of one with these ``custom_params``."""
    parameters = SimpleNamespace(custom_params=custom_params)
    settle(manager(tokenizer, answer_cache), parameters)
    return SimpleNamespace(sampling_params=parameters, origin_input_ids=[1, 2])


def with_labels(tokenizer, candidates):
    return settled({"dspark": {"preset": "classification", "candidates": candidates}}, tokenizer)


@pytest.mark.parametrize("field", ['{"max_verify": 2, "trace": true}', {"max_verify": 2, "trace": True}])
def test_text_of_a_body_and_an_object_of_a_program_are_the_same(field):
    req = settled({"dspark": field, "mine": 1})
    assert req.sampling_params.custom_params["mine"] == 1
    assert isinstance(req.sampling_params.custom_params["dspark"], str)
    assert request_options(req) == RequestOptions(max_verify=2, trace=True)


@pytest.mark.parametrize("field", [None, {}, "null", "{}", '{"trace": false}', {"enabled": True, "preset": "auto"}])
def test_values_that_ask_for_nothing_leave_no_trace(field):
    req = settled({"dspark": field, "mine": 1})
    assert req.sampling_params.custom_params == {"mine": 1}
    assert request_options(req) == RequestOptions()


@pytest.mark.parametrize("custom_params", [None, {}, {"mine": 1}, {"dspark": {"max_verify": 7}}])
def test_the_field_of_a_body_wins_over_what_the_body_carries_itself(custom_params):
    before = ASKED.set('{"max_verify": 2}')
    try:
        req = settled(custom_params)
    finally:
        ASKED.reset(before)
    assert request_options(req) == RequestOptions(max_verify=2)
    assert ("mine" in req.sampling_params.custom_params) == ("mine" in (custom_params or {}))


@pytest.mark.parametrize("custom_params", [None, {}, {"mine": {"max_verify": 2}}])
def test_requests_without_the_field_are_left_alone(custom_params):
    req = settled(custom_params)
    assert req.sampling_params.custom_params is custom_params
    assert request_options(req) == RequestOptions()


def test_requests_that_share_their_custom_params_are_each_checked():
    """Prompts of a batch do: what is checked once must not be read as a client's own."""
    shared = {"dspark": '{"preset": "classification", "candidates": ["ab"]}'}
    first, second = (settled(shared, Tokenizer()) for _ in range(2))
    assert request_options(first) == request_options(second)
    assert shared["dspark"].startswith('{"preset"')


@pytest.mark.parametrize(
    ("field", "named"),
    [
        ("x", "speculation must be an object, not 'x'"),
        ('{"max_verify": -1}', "speculation.max_verify must be an integer from 0 to 65535, not -1"),
        ('{"labels": [[7, 8]]}', "speculation.labels is not a known option"),
        ({"confidence_threshold": 0.5}, "speculation.confidence_threshold needs a drafter with a confidence head"),
        ({"preset": "classification", "candidates": ["a"]}, "speculation.candidates needs a tokenizer"),
        ({"cache": "k"}, "speculation.cache='k' needs .* start this one with --speculative-dspark-answer-cache"),
        ('{"x": ' + "[" * 5000 + "]" * 5000 + "}", "speculation is nested too deeply"),
    ],
)
def test_bad_values_are_refused_by_name(field, named):
    with pytest.raises(ValueError, match=f"^{named}"):
        settled({"dspark": field})


def test_labels_arrive_in_both_spellings():
    req = with_labels(Tokenizer(), ["ab"])
    assert request_options(req).labels == (tuple(b"ab"), tuple(b" ab"))


def test_the_labels_of_a_batch_are_tokenized_once():
    tokenizer = Tokenizer()
    for _ in range(3):
        with_labels(tokenizer, ["yes", "no"])
    assert tokenizer.calls == 1


def test_too_many_tokens_are_refused_by_name():
    candidates = [f"{place:0100d}" for place in range(100)]
    with pytest.raises(ValueError, match=rf"speculation.candidates are {100 * 201} tokens.*at most {MAX_LABEL_TOKENS}"):
        with_labels(Tokenizer(), candidates)
    assert with_labels(Tokenizer(), candidates[:80])


@pytest.mark.parametrize(
    ("label", "named"),
    [
        ("\N{ZERO WIDTH SPACE}", "which has no token; drop it"),
        ("yes \N{CYRILLIC SMALL LETTER A}", "whose token 1072 the target does not have"),
        (chr(256), "whose token 256 the target does not have .its ids lie below 256.; drop it"),
    ],
)
def test_labels_that_no_answer_can_hold_are_refused_by_name(label, named):
    """A normaliser takes some letters for nothing, and a tokenizer may know more tokens than its model."""

    class Normalising(Tokenizer):
        def __call__(self, texts, **options):
            return super().__call__([text.strip(" \N{ZERO WIDTH SPACE}") for text in texts], **options)

    with pytest.raises(ValueError, match=f"speculation.candidates holds .*{named}"):
        with_labels(Normalising(), ["no", label])
    assert with_labels(Normalising(), ["no", chr(255)])


@pytest.mark.parametrize("candidates", [["\N{GRINNING FACE}" * 51], [f"{place:0199d}" for place in range(200)]])
def test_too_many_bytes_are_refused_before_they_are_tokenized(candidates):
    with pytest.raises(
        ValueError, match=r"speculation.candidates must be strings of at most 200 bytes, and 32768 in all"
    ):
        with_labels(None, candidates)


def test_options_of_a_request_are_read_once():
    req = settled({"dspark": {"max_verify": 2}})
    assert request_options(req) is request_options(req)


def test_a_batch_has_limits_only_if_a_request_asks_for_less():
    usual, traced, short = (settled({"dspark": field}) for field in (None, {"trace": True}, {"max_verify": 2}))
    assert batch_options([usual, usual]).limits is None
    both = batch_options([traced, short])
    assert (both.limits, both.traced, both.rules) == (RequestLimits((7, 2)), True, None)
    assert batch_options([usual, short], max_verify=2).limits is None


def test_requests_say_what_their_chains_are():
    fields = [None, {"preset": "none"}, {"preset": "summarization"}]
    fields += [{"preset": "summarization", "min_ngram": 1, "max_ngram": 8, "max_draft": 2}]
    usual, *others = map(settled, [{"dspark": field} for field in fields])
    assert batch_options([usual, usual]).rules is None
    rules = batch_options([usual, *others]).rules
    assert [tuple(row) for row in rules.bounds.tolist()] == [
        USUAL,
        (MOST_MATCH + 1, *USUAL[1:]),
        (3, 5, USUAL[2], ASKED_ROWS),
        (1, MOST_MATCH, 2, ASKED_ROWS),
    ]
    assert rules.second is None
    with pytest.raises(ValueError, match=f"from 1 to {MOST_MATCH}"):
        settled({"dspark": {"preset": "summarization", "max_ngram": MOST_MATCH + 1}})


def test_labels_are_one_text_that_is_looked_up_from_their_beginnings():
    """A recorded answer is a label."""
    usual, labelled = settled(None), with_labels(Tokenizer(), ["ab", "c"])
    recorded = settled({"dspark": {"preset": "replay", "recorded": list(range(12)), "max_draft": 4}})
    rules, never = batch_options([usual, labelled, recorded]).rules, MOST_MATCH + 1
    assert [tuple(row) for row in rules.bounds[:, [0, 2, 3]].tolist()] == [(3, USUAL[2], 0)] * 2 + [(3, 4, 0)]
    assert set(rules.second.rows.tolist()) == {ASKED_ROWS}
    assert second_text(rules, 0) == ([], [])
    assert second_text(rules, 1) == (
        [-1, *b"ab", -1, *b" ab", -1, *b"c", -1, *b" c", -1],
        [never, 1, never, never, 1, 2, never, never, never, never, 1, never, never],
    )
    assert second_text(rules, 2) == ([-1, *range(12), -1], [never, 1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 8, never, never])


def test_answers_of_a_key_are_one_text_that_matches_anywhere_but_at_their_ends():
    """A request sees those that were there when it was first read."""
    cache, never = AnswerCache(10**6), MOST_MATCH + 1
    cache.keep("k", [4, 5, 6, 7])
    reqs = [settled({"dspark": {"cache": key}}, answer_cache=1) for key in ("k", "other")]
    assert batch_options(reqs[1:], answers=cache).rules is None
    for kept in ([8, 9], [3]):
        rules = batch_options(reqs, answers=cache).rules
        assert second_text(rules, 0) == ([-1, 4, 5, 6, 7, -1], [never, 3, 3, 3, never, never])
        assert second_text(rules, 1) == ([], [])
        assert set(rules.second.rows.tolist()) == {CACHED_ROWS}
        cache.keep("k", kept)
        cache.keep("other", kept)
    late = settled({"dspark": {"cache": "k", "preset": "summarization"}}, answer_cache=1)
    text, needed = second_text(batch_options([late], answers=cache).rules, 0)
    assert text == [-1, 3, -1, 8, 9, -1, 4, 5, 6, 7, -1]
    assert needed[:5] == [never, never, never, 3, never]


def test_forced_tokens_are_a_label_of_one_step():
    """They come before what a request has asked for, and leave it where it is."""
    reqs = [settled(None), with_labels(Tokenizer(), ["ab"]), settled({"dspark": {"preset": "none"}})]
    usual, never = batch_options(reqs).rules, MOST_MATCH + 1
    rules = with_forced(usual, reqs, [(7, 8, 9), (7, 8), (7, 8)], torch.device("cpu"))
    assert second_text(rules, 0) == ([-1, 7, 8, 9, -1], [never, 1, 2, never, never])
    tokens, needed = second_text(rules, 1)
    assert (tokens[:4], needed[:4]) == ([-1, 7, 8, -1], [never, 1, never, never])
    assert (tokens[4:], needed[4:]) == second_text(usual, 1)
    assert second_text(rules, 2) == ([], [])
    assert with_forced(usual, reqs, [(), (), (7, 8)], torch.device("cpu")) is usual
    alone = with_forced(None, reqs[:1], [(7, 8)], torch.device("cpu"))
    assert (second_text(alone, 0)[0], alone.bounds.tolist()) == ([-1, 7, 8, -1], [list(USUAL)])


def test_what_a_step_looks_up_is_bounded(monkeypatch):
    """Requests past the bound keep their bounds, and are drafted without their texts."""
    monkeypatch.setattr(module, "MOST_PLACES", 8)
    recorded = [{"preset": "replay", "recorded": list(range(length)), "max_draft": 2} for length in (3, 9, 1)]
    rules = batch_options([settled({"dspark": field}) for field in recorded]).rules
    assert [second_text(rules, request)[0] for request in range(3)] == [[-1, 0, 1, 2, -1], [], [-1, 0, -1]]
    assert rules.bounds[:, 2].tolist() == [2, 2, 2]


def test_nothing_but_presets_speculates_without_a_drafter():
    usual, copying = settled(None), settled({"dspark": {"preset": "summarization"}})
    options = BatchOptions.of([usual, copying], 7, torch.device("cpu"), draft_free=True)
    assert options.limits == RequestLimits((0, 7))


def batch_options(reqs, max_verify=7, answers=None):
    return BatchOptions.of(reqs, max_verify, torch.device("cpu"), answers=answers)


def second_text(rules, request):
    """The tokens of a request's second text, and what is needed."""
    own = rules.second.requests == request
    return rules.second.tokens[own].tolist(), rules.second.needed[own].tolist()
