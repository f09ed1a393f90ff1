"""Rules say what is looked up for each request of a batch, and where."""

import pytest
import torch
from dspark_kernels import ASKED_ROWS, CACHED_ROWS, MOST_MATCH, USUAL
from settled_requests import LetterTokenizer, settled
from sglang_objects import server_args
from stage_loop import lookup_of

from sglang_dspark.config import DSparkConfig
from sglang_dspark.engine.request_options import BatchOptions
from sglang_dspark.engine.server import DSparkServer, attach
from sglang_dspark.features import prompt_lookup
from sglang_dspark.features.builtin_worker import ScheduledServer
from sglang_dspark.features.prompt_lookup import rules as module
from sglang_dspark.features.prompt_lookup.keys import answer_key
from sglang_dspark.features.prompt_lookup.rules import AnswerCache, rules_of, with_forced
from sglang_dspark.step.state import RequestLimits
from sglang_dspark.worker.drafter import NoDrafter

CPU, NEVER = torch.device("cpu"), MOST_MATCH + 1


def rules_for(reqs, answers=None):
    return rules_of(reqs, CPU, answers or AnswerCache(0))


def second_text(rules, request):
    """The tokens of a request's second text, and what is needed."""
    own = rules.second.requests == request
    return rules.second.tokens[own].tolist(), rules.second.needed[own].tolist()


def with_labels(candidates):
    return settled({"preset": "classification", "candidates": candidates}, LetterTokenizer())


def test_requests_say_what_is_looked_up():
    fields = [None, {"preset": "none"}, {"preset": "summarization"}]
    fields += [{"preset": "summarization", "min_ngram": 1, "max_ngram": 8, "max_draft": 2}]
    usual, *others = map(settled, fields)
    assert rules_for([usual, usual]) is None
    rules = rules_for([usual, *others])
    assert [tuple(row) for row in rules.bounds.tolist()] == [
        USUAL,
        (NEVER, *USUAL[1:]),
        (3, 5, USUAL[2], ASKED_ROWS),
        (1, MOST_MATCH, 2, ASKED_ROWS),
    ]
    assert rules.second is None
    with pytest.raises(ValueError, match=f"from 1 to {MOST_MATCH}"):
        settled({"preset": "summarization", "max_ngram": MOST_MATCH + 1})


def test_labels_are_one_text_that_is_looked_up_from_their_beginnings():
    usual, labelled, long = settled(None), with_labels(["ab", "c"]), with_labels(["\t0123456789"])
    rules = rules_for([usual, labelled, long])
    assert [tuple(row) for row in rules.bounds[:, [0, 2, 3]].tolist()] == [(3, USUAL[2], 0)] * 3
    assert set(rules.second.rows.tolist()) == {ASKED_ROWS}
    assert second_text(rules, 0) == ([], [])
    assert second_text(rules, 1) == (
        [-1, *b"ab", -1, *b" ab", -1, *b"c", -1, *b" c", -1],
        [NEVER, 1, NEVER, NEVER, 1, 2, NEVER, NEVER, NEVER, NEVER, 1, NEVER, NEVER],
    )
    assert second_text(rules, 2)[1] == [NEVER, 1, 2, 3, 4, 5, 6, 7, 8, 8, 8, NEVER, NEVER]


def predicting(text, **more):
    return {"prediction": {"type": "content", "content": text}, **more}


def test_a_prediction_goes_on_wherever_the_answer_comes_back_to_it():
    cache = AnswerCache(10**6)
    cache.keep("k", [4, 5])
    alone = settled(predicting("abcdef\u0100gh"), LetterTokenizer(), 256)
    beside = settled(predicting("ab", cache="k"), LetterTokenizer(), 256, answer_cache=1)
    rules = rules_for([alone, beside], cache)
    assert second_text(rules, 0) == (
        [-1, *b"abcdef", -1, *b"gh", -1],
        [NEVER, 1, 2, 3, 3, 3, NEVER, NEVER, 1, NEVER, NEVER],
    )
    assert second_text(rules, 1)[0] == [-1, *b"ab", -1, -1, 4, 5, -1]
    assert rules.second.rows[rules.second.requests == 1].tolist() == [ASKED_ROWS] * 4 + [CACHED_ROWS] * 4


def test_answers_of_a_key_are_one_text_that_matches_anywhere_but_at_their_ends():
    """Those that come while a request runs are there when its batch is another one."""
    cache = AnswerCache(10**6)
    cache.keep("k", [4, 5, 6, 7])
    reqs = [settled({"cache": key}, answer_cache=1) for key in ("k", "other")]
    assert rules_for(reqs[1:], cache) is None
    rules = rules_for(reqs, cache)
    assert second_text(rules, 0) == ([-1, 4, 5, 6, 7, -1], [NEVER, 3, 3, 3, NEVER, NEVER])
    assert second_text(rules, 1) == ([], [])
    assert set(rules.second.rows.tolist()) == {CACHED_ROWS}
    for kept in ([8, 9], [3]):
        cache.keep("k", kept)
    text, needed = second_text(rules_for(reqs, cache), 0)
    assert text == [-1, 3, -1, 8, 9, -1, 4, 5, 6, 7, -1]
    assert needed[:5] == [NEVER, NEVER, NEVER, 3, NEVER]


def test_samples_of_one_prompt_copy_from_each_other():
    """On a server that takes prompts for keys; not of another adapter, nor where a request wants none."""
    cache = AnswerCache(10**6, by_prompt=True)

    def sample(prompt, lora_id=None, **field):
        req = settled(field or None, answer_cache=1)
        req.origin_input_ids, req.lora_id = prompt, lora_id
        return req

    first, second = sample([1, 2, 3]), sample([1, 2, 3])
    key = answer_key(first, by_prompt=True)
    assert key and answer_key(first, by_prompt=False) == ""
    assert rules_for([first, second], cache) is None
    cache.keep(key, [4, 5, 6])
    others = [
        sample([1, 2]),
        sample([1, 2, 3], "adapter"),
        sample([1, 2, 3], preset="none"),
        sample([1, 2, 3], cache="k"),
    ]
    rules = rules_for([second, *others], cache)
    assert second_text(rules, 0)[0] == [-1, 4, 5, 6, -1]
    assert [second_text(rules, place)[0] for place in (1, 2, 3, 4)] == [[]] * 4


def test_forced_tokens_are_a_label_of_one_step():
    """They come before what a request has asked for, and leave it where it is."""
    reqs = [settled(None), with_labels(["ab"]), settled({"preset": "none"})]
    usual = rules_for(reqs)
    rules = with_forced(usual, reqs, [(7, 8, 9), (7, 8), (7, 8)], CPU)
    assert second_text(rules, 0) == ([-1, 7, 8, 9, -1], [NEVER, 1, 2, NEVER, NEVER])
    tokens, needed = second_text(rules, 1)
    assert (tokens[:4], needed[:4]) == ([-1, 7, 8, -1], [NEVER, 1, NEVER, NEVER])
    assert (tokens[4:], needed[4:]) == second_text(usual, 1)
    assert second_text(rules, 2) == ([], [])
    assert with_forced(usual, reqs, [(), (), (7, 8)], CPU) is usual
    alone = with_forced(None, reqs[:1], [(7, 8)], CPU)
    assert (second_text(alone, 0)[0], alone.bounds.tolist()) == ([-1, 7, 8, -1], [list(USUAL)])


def test_what_a_step_looks_up_is_bounded(monkeypatch):
    """Requests past the bound keep their bounds, and are drafted without their texts."""
    monkeypatch.setattr(module, "MOST_PLACES", 8)
    rules = rules_for([settled(predicting("a" * length), LetterTokenizer()) for length in (3, 9, 1)])
    assert [second_text(rules, request)[0] for request in range(3)] == [[-1, *b"aaa", -1], [], [-1, *b"a", -1]]
    assert rules.bounds.tolist() == [[*USUAL]] * 3


@pytest.mark.parametrize(("options", "used"), [({}, True), ({"draft_free": True}, True), ({"schedule": "off"}, False)])
def test_servers_that_verify_no_draft_look_nothing_up(options, used):
    server = DSparkServer(DSparkConfig(**options), drafter=None, dummy_draft=False)
    args = server_args()
    for attached, expected in ((server, used), (ScheduledServer(DSparkConfig(**options)), False)):
        attach(args, attached)
        assert prompt_lookup.FEATURE.is_used(args) == expected


def test_nothing_but_named_candidates_is_verified_without_a_drafter():
    config, source = DSparkConfig(draft_free=True), lookup_of(7)
    fields = [None, {"preset": "summarization"}, {"preset": "none"}, predicting("a"), predicting("")]
    reqs = [settled(field, LetterTokenizer()) for field in fields]
    for found, most in ((source, (0, 7, 0, 7, 0)), (None, (0,) * 5)):
        drafter = NoDrafter(config, 9, CPU, found)
        assert BatchOptions.of(reqs, 7, drafter.drafts_for).limits == RequestLimits(most)
