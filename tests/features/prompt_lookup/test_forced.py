"""Forced tokens, by engine of grammars: as many as are certain, and no more than a step can use."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from grammar_backends import EOS, VOCAB, Backends, after
from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject
from sglang_objects import request
from tokenizers import Tokenizer, models, normalizers
from transformers import PreTrainedTokenizerFast

from sglang_dspark.features.prompt_lookup.rules import ForcedTokens

FORCED = "(red|blue) shoes-x"


class Forcing(BaseGrammarObject):
    """Forces a text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text, self.asked = text, 0

    def is_terminated(self) -> bool:
        return False

    def try_jump_forward(self, tokenizer: Any) -> tuple[list[int], str]:
        self.asked += 1
        return [], self._text


@pytest.fixture(scope="module")
def backends(tmp_path_factory: pytest.TempPathFactory) -> Backends:
    return Backends(tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.parametrize(
    ("committed", "forced"),
    [("", ""), ("r", "ed shoes-"), ("re", "d shoes-"), ("blue sho", "es-"), ("red shoes-", ""), ("red shoes-x", "")],
)
def test_forced_tokens_follow_the_last_one(backends, committed, forced):
    """The last token of a forced text may go on behind it, so it is no candidate."""
    tokenizer, grammar = backends.tokenizer, backends.xgrammar.dispatch_regex(FORCED)
    ids = tokenizer(f"x{committed}").input_ids
    req = request(ids, grammar=after(grammar, ids[1:]))
    expected = (ids[-1], *tokenizer(forced).input_ids) if forced else ()
    assert ForcedTokens(tokenizer, VOCAB, 16).of(req) == expected


def test_tokens_that_llguidance_forces(backends):
    tokenizer, grammar = backends.tokenizer, backends.llguidance.dispatch_regex(FORCED)
    begun = tokenizer("r").input_ids
    req = request(begun, grammar=after(grammar, begun))
    assert ForcedTokens(tokenizer, VOCAB, 16).of(req) == tuple(tokenizer("red shoes-x").input_ids)


def test_nothing_is_forced_where_no_grammar_has_a_say(backends):
    tokenizer, forcing = backends.tokenizer, backends.xgrammar.dispatch_regex(FORCED)
    thinking = backends.reasoner(FORCED)
    finished = after(forcing, tokenizer("r").input_ids)
    finished.finished = True
    ended = after(forcing, [*tokenizer("red shoes-x").input_ids, EOS])
    reqs = [request([9], grammar=grammar) for grammar in (None, thinking, finished, ended)]
    assert [ForcedTokens(tokenizer, VOCAB, 16).of(req) for req in reqs] == [()] * 4


def test_forced_texts_are_encoded_as_inside_of_a_text():
    """Tokenizers of SentencePiece's kind put a space before a text: the forced one continues another."""
    pieces = {"▁": 0, "▁ab": 1, "ab": 2, "c": 3, "\n": 4, "▁c": 5, "<unk>": 6}
    inner = Tokenizer(models.BPE(pieces | {"a": 7, "b": 8}, [("a", "b")], unk_token="<unk>"))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    pieced = PreTrainedTokenizerFast(tokenizer_object=inner)
    req = request([9], grammar=Forcing("abc"))
    assert ForcedTokens(pieced, VOCAB, 16).of(req) == (9, 2)


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
    """A token of one byte may end within a letter; what is forced behind it does not begin with one."""
    tokenizer, grammar = backends.tokenizer, backends.xgrammar.dispatch_regex("да!")
    req = forced_by(tokenizer, grammar, "")
    grammar = after(grammar, tokenizer("д").input_ids[:1])
    assert ForcedTokens(tokenizer, VOCAB, 64).of(request([9], grammar=grammar)) == ()
    assert len(ForcedTokens(tokenizer, VOCAB, 64).of(req)) == len(tokenizer("да!").input_ids)


def test_a_forced_text_is_read_as_far_as_a_step_can_use_it(backends):
    """It reads the beginning of a long one; of one that takes the grammar too long to tell, no more than once."""
    tokenizer = backends.tokenizer
    for backend in (backends.xgrammar, backends.llguidance):
        req = forced_by(tokenizer, backend.dispatch_regex("ab{9000}"), "a")
        assert ForcedTokens(tokenizer, VOCAB, 5).of(req)[:6] == (
            *tokenizer("a").input_ids,
            *tokenizer("bbbbb").input_ids,
        )
    encoded = []
    counting = SimpleNamespace(encode=lambda text, **_: encoded.append(len(text)) or tokenizer.encode(text))
    forcing = Forcing("b" * 10**6)
    req = request([9], grammar=forcing)
    for _ in range(3):
        ForcedTokens(counting, VOCAB, 5).of(req)
    assert forcing.asked == 1 and max(encoded) < 200


def test_forced_tokens_end_before_one_that_the_target_does_not_have(backends):
    tokenizer = backends.tokenizer
    for most, expected in ((VOCAB, "red shoes-"), (tokenizer("-").input_ids[0], "red shoes")):
        grammar = backends.xgrammar.dispatch_regex("x" + FORCED)
        req = forced_by(tokenizer, grammar, "xr")
        found = ForcedTokens(tokenizer, most, 16).of(req)
        assert found == tuple(tokenizer("r" + expected[1:]).input_ids)


def forced_by(tokenizer: Any, grammar: Any, text: str) -> Any:
    """A request whose text so far this is, behind another token."""
    ids = tokenizer(text).input_ids
    return request([9, *ids], grammar=after(grammar, ids))
