"""Tests of what is looked up for each request of a batch: rules, forced tokens of grammars, and kept answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dspark_kernels import ASKED_ROWS, CACHED_ROWS, MOST_MATCH, USUAL
from golden_server import LetterTokenizer, settled
from letter_tokenizers import EOS, VOCAB, Backends, after
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH
from sglang_objects import request, server_args
from stage_loop import lookup_of
from tokenizers import Tokenizer, models, normalizers
from transformers import PreTrainedTokenizerFast

from sglang_dspark.config import DSparkConfig
from sglang_dspark.engine.request_options import BatchOptions
from sglang_dspark.engine.server import DSparkServer, attach
from sglang_dspark.features import prompt_lookup
from sglang_dspark.features.builtin_worker import ScheduledServer
from sglang_dspark.features.prompt_lookup import PromptLookup
from sglang_dspark.features.prompt_lookup import rules as module
from sglang_dspark.features.prompt_lookup.keys import answer_key
from sglang_dspark.features.prompt_lookup.rules import MOST_TOKENS, AnswerCache, ForcedTokens, rules_of, with_forced
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
    rules = with_forced(usual, reqs, [(7, 8, 9), (7, 8), ()], CPU)
    assert second_text(rules, 0) == ([-1, 7, 8, 9, -1], [NEVER, 1, 2, NEVER, NEVER])
    tokens, needed = second_text(rules, 1)
    assert (tokens[:4], needed[:4]) == ([-1, 7, 8, -1], [NEVER, 1, NEVER, NEVER])
    assert (tokens[4:], needed[4:]) == second_text(usual, 1)
    assert second_text(rules, 2) == ([], [])
    assert with_forced(usual, reqs, [(), (), ()], CPU) is usual
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


FORCED = "(red|blue) shoes-x"


@pytest.fixture(scope="module")
def backends(tmp_path_factory: pytest.TempPathFactory) -> Backends:
    return Backends(tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.parametrize(
    ("committed", "forced"),
    [("", ""), ("r", "ed shoes-"), ("re", "d shoes-"), ("blue sho", "es-"), ("red shoes-", ""), ("red shoes-x", "")],
)
def test_forced_tokens_follow_the_last_one(backends, committed, forced):
    """The last token of a forced text may go on after it, so it is no candidate."""
    tokenizer, grammar = backends.tokenizer, backends.xgrammar.dispatch_regex(FORCED)
    ids = tokenizer(f"x{committed}").input_ids
    req = request(ids, grammar=after(grammar, ids[1:]))
    expected = (ids[-1], *tokenizer(forced).input_ids) if forced else ()
    assert ForcedTokens(tokenizer, VOCAB, 16).of(req) == expected


def test_tokens_that_llguidance_forces(backends):
    tokenizer, grammar = backends.tokenizer, backends.llguidance.dispatch_regex(FORCED)
    begun = tokenizer("r").input_ids
    req = request(begun, grammar=after(grammar, begun))
    assert ForcedTokens(tokenizer, VOCAB, 16).of(req) == tuple(tokenizer("red shoes-").input_ids)


def test_nothing_is_forced_where_no_grammar_has_a_say(backends):
    tokenizer, forcing = backends.tokenizer, backends.xgrammar.dispatch_regex(FORCED)
    thinking = backends.reasoner(FORCED)
    finished = after(forcing, tokenizer("r").input_ids)
    finished.finished = True
    ended = after(forcing, [*tokenizer("red shoes-x").input_ids, EOS])
    reqs = [request([9], grammar=grammar) for grammar in (None, thinking, finished, ended)]
    wanting_none = settled({"preset": "none"})
    wanting_none.grammar = after(forcing, tokenizer("r").input_ids)
    assert [ForcedTokens(tokenizer, VOCAB, 16).of(req) for req in (*reqs, wanting_none)] == [()] * 5


def test_forced_texts_are_encoded_as_inside_of_a_text():
    """Tokenizers of SentencePiece's kind put a space before a text: the forced one continues another."""
    pieces = {"▁": 0, "▁ab": 1, "ab": 2, "c": 3, "\n": 4, "▁c": 5, "<unk>": 6}
    inner = Tokenizer(models.BPE(pieces | {"a": 7, "b": 8}, [("a", "b")], unk_token="<unk>"))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    pieced = PreTrainedTokenizerFast(tokenizer_object=inner)
    backend = XGrammarGrammarBackend(pieced, len(pieces) + 2, [6])
    req = request([9], grammar=backend.dispatch_regex("abc"))
    assert ForcedTokens(pieced, len(pieces) + 2, 16).of(req) == (9, 2)


@pytest.mark.parametrize(
    ("regex", "before", "forced"),
    [
        ("ok: (да|нет)", "", "ok: "),
        ("ok: (да|нет)", "ok: ", ""),
        ("(é|è)x", "", ""),
        ("ok 한국어 (🙂|🚀)", "ok", " 한국어 "),
        ("😀👍", "", "😀👍"),
    ],
)
def test_forced_texts_end_before_the_letter_that_forks(backends, regex, before, forced):
    """Alternatives that share their first byte: xgrammar forces half a letter, which is no text."""
    tokenizer = backends.tokenizer
    req = forced_by(tokenizer, backends.xgrammar.dispatch_regex(regex), before)
    ids = tokenizer(forced).input_ids
    expected = (req.output_ids[-1], *ids[:-1]) if len(ids) > 1 else ()
    assert ForcedTokens(tokenizer, VOCAB, 64).of(req) == expected


def test_nothing_is_forced_within_a_letter(backends):
    """A token of one byte may end within a letter; what is forced after it does not begin with one."""
    tokenizer, grammar = backends.tokenizer, backends.xgrammar.dispatch_regex("да!")
    req = forced_by(tokenizer, grammar, "")
    grammar = after(grammar, tokenizer("д").input_ids[:1])
    assert ForcedTokens(tokenizer, VOCAB, 64).of(request([9], grammar=grammar)) == ()
    assert len(ForcedTokens(tokenizer, VOCAB, 64).of(req)) == len(tokenizer("да!").input_ids)


@pytest.mark.parametrize("backend", ["xgrammar", "llguidance"])
def test_a_forced_text_is_read_as_far_as_a_step_can_use_it(backends, backend):
    """From any place in it that the text's end matches, enough follows also where it repeats itself."""
    tokenizer = backends.tokenizer
    req = forced_by(tokenizer, getattr(backends, backend).dispatch_regex("ab{9000}"), "a")
    before = str(req.grammar.accepted_tokens) if backend == "xgrammar" else ""
    for _ in range(2):
        assert ForcedTokens(tokenizer, VOCAB, 5).of(req) == tuple(tokenizer("a" + "b" * (MOST_MATCH + 5)).input_ids)
    assert not before or str(req.grammar.accepted_tokens) == before


ENDLESS = [
    ("ebnf", 'root ::= "a" root'),
    ("ebnf", 'root ::= "ab"{1000000}'),
    ("ebnf", 'root ::= x x x x "z"\nx ::= "a" x | "a"{900}'),
    ("json", '{"type":"string","pattern":"^(a{1000}){1000}$"}'),
]


@pytest.mark.parametrize(("kind", "text"), ENDLESS)
def test_what_is_forced_without_end_is_read_as_fast_as_any_other(backends, kind, text):
    """Asked for all that they force, these grammars take seconds in every step, or never come back."""
    req = forced_by(
        backends.tokenizer, getattr(backends.xgrammar, f"dispatch_{kind}")(text), "" if kind == "ebnf" else '"'
    )
    assert len(ForcedTokens(backends.tokenizer, VOCAB, 5).of(req)) == MOST_MATCH + 6


def test_forced_tokens_end_before_one_that_the_target_does_not_have(backends):
    tokenizer = backends.tokenizer
    for most, expected in ((VOCAB, "red shoes-"), (tokenizer("-").input_ids[0], "red shoe")):
        grammar = XGrammarGrammarBackend(tokenizer, most, [EOS]).dispatch_regex("x" + FORCED)
        found = ForcedTokens(tokenizer, most, 16).of(forced_by(tokenizer, grammar, "xr"))
        assert found == tuple(tokenizer(expected).input_ids)


def forced_by(tokenizer: Any, grammar: Any, text: str) -> Any:
    """A request whose text so far this is, after another token."""
    ids = tokenizer(text).input_ids
    return request([9, *ids], grammar=after(grammar, ids))


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
    answers = AnswerCache(ROOM)
    part = PromptLookup(answers, ForcedTokens(None, 1, 1), torch.device("cpu"))
    req = settled({"cache": key} if key else {}, answer_cache=1)
    req.output_ids.extend([5, 6, 7])
    req.finished_reason = reason
    part.request_ended(req)
    assert read(answers, key) == kept


@pytest.mark.parametrize("event", [PromptLookup.flushed, PromptLookup.weights_changed], ids=["flush", "new weights"])
def test_answers_from_before_are_forgotten(event):
    answers = AnswerCache(ROOM)
    answers.keep("a", [5])
    event(PromptLookup(answers, ForcedTokens(None, 1, 1), torch.device("cpu")))
    assert read(answers, "a") == []
