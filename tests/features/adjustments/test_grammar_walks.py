"""Following a grammar along drafts: masks as if every row had been reached token by token, and the state left alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from byte_tokenizer import save_byte_tokenizer
from sglang.srt.constrained.llguidance_backend import GuidanceBackend
from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarBackend
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend
from sglang.srt.parser.reasoning_parser import BaseReasoningFormatDetector
from tokenizers import Tokenizer, models, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from sglang_dspark.engine.scheduler.forced import ForcedTokens
from sglang_dspark.features.adjustments.grammars import grammar_masks

VOCAB, EOS, THINK_END = 256, 1, 2
REGEX = "[ab]{2}(c|d)+e?"
FORCED = "(red|blue) shoes-x"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(save_byte_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def grammars(tokenizer: Any) -> dict[str, Any]:
    """A grammar of each engine at its start; to be copied."""
    xgrammar = XGrammarGrammarBackend(tokenizer, VOCAB, [EOS])
    mark = tokenizer.convert_ids_to_tokens(THINK_END)
    parser = SimpleNamespace(detector=BaseReasoningFormatDetector(mark, mark))
    reasoner = ReasonerGrammarBackend(xgrammar, parser, tokenizer)
    compiling, _ = reasoner.get_cached_or_future_value(("regex", REGEX), True)
    llguidance = GuidanceBackend(tokenizer, n_vocab=VOCAB)
    return {
        "xgrammar": xgrammar.dispatch_regex(REGEX),
        "reasoner": compiling.result(),
        "llguidance": llguidance.dispatch_regex(REGEX),
        "forcing": xgrammar.dispatch_regex(FORCED),
        "guided": llguidance.dispatch_regex(FORCED),
    }


def after(grammar: Any, tokens: list[int]) -> Any:
    advanced = grammar.copy()
    for token in tokens:
        advanced.accept_token(token)
    return advanced


def mask_of(grammar: Any) -> list[int]:
    mask = grammar.allocate_vocab_mask(VOCAB, 1, "cpu")
    grammar.fill_vocab_mask(mask, 0)
    return mask[0].tolist()


# Committed text, drafts, and how many rows the grammar reaches: the last one judges the draft that it forbids.
WALKS = [("", "abcd", 5), ("", "", 1), ("a", "bcx", 3), ("ab", "xc", 1), ("abc", "de<eos>a", 3), ("abcde", "<eos>", 1)]


@pytest.mark.parametrize(("committed", "drafted", "rows"), WALKS)
@pytest.mark.parametrize("engine", ["xgrammar", "llguidance", "reasoner"])
def test_masks_along_the_drafts(tokenizer, grammars, engine, committed, drafted, rows):
    before = [THINK_END] if engine == "reasoner" else []
    before += tokenizer(committed).input_ids
    drafts = tokenizer(drafted).input_ids
    reqs = [SimpleNamespace(grammar=g) for g in (None, after(grammars[engine], before), None)]
    for _ in range(2):  # the second walk starts where the first one did
        found, masks = grammar_masks(reqs, [[5, 6], [7, *drafts], [8]], VOCAB)
        assert found == list(range(2, 2 + rows))
        for row, mask in enumerate(masks.tolist()):
            assert mask == mask_of(after(grammars[engine], [*before, *drafts[:row]]))


def test_a_grammar_without_a_say_masks_nothing(tokenizer, grammars):
    ended = after(grammars["xgrammar"], [*tokenizer("abc").input_ids, EOS])
    finished = after(grammars["xgrammar"], [])
    finished.finished = True
    reqs = [SimpleNamespace(grammar=g) for g in (None, ended, finished)]
    assert grammar_masks(reqs, [[1], [1, 2], [1]], VOCAB) == ([], None)


def test_thinking_is_not_masked(tokenizer, grammars):
    """Before the end of its thoughts a reasoning model may write anything; the grammar begins behind them."""
    drafts = [*tokenizer("zz").input_ids, THINK_END, *tokenizer("ax").input_ids]
    _, masks = grammar_masks([SimpleNamespace(grammar=after(grammars["reasoner"], []))], [[9, *drafts]], VOCAB)
    assert (masks[:3] == -1).all()
    assert len(masks) == 5  # up to the row that judges the x
    for row in (3, 4):
        assert masks[row].tolist() == mask_of(after(grammars["reasoner"], drafts[:row]))


def test_a_draft_that_no_tokenizer_knows_is_forbidden(grammars):
    """A model's vocabulary may be padded; llguidance has masks of its tokenizer's."""
    grammar = grammars["llguidance"].copy()
    rows, _ = grammar_masks([SimpleNamespace(grammar=grammar)], [[9, VOCAB + 40, 5]], VOCAB + 64)
    assert rows == [0]


@pytest.mark.parametrize(
    ("committed", "forced"),
    [("", ""), ("r", "ed shoes-"), ("re", "d shoes-"), ("blue sho", "es-"), ("red shoes-", ""), ("red shoes-x", "")],
)
def test_forced_tokens_follow_the_last_one(tokenizer, grammars, committed, forced):
    """The last token of a forced text may go on behind it, so it is no candidate."""
    ids = tokenizer(f"x{committed}").input_ids
    req = SimpleNamespace(grammar=after(grammars["forcing"], ids[1:]), output_ids=ids)
    expected = (ids[-1], *tokenizer(forced).input_ids) if forced else ()
    assert ForcedTokens(tokenizer, VOCAB, 16).of(req) == expected


def test_tokens_that_llguidance_forces(tokenizer, grammars):
    req = SimpleNamespace(
        grammar=after(grammars["guided"], tokenizer("r").input_ids), output_ids=tokenizer("r").input_ids
    )
    assert ForcedTokens(tokenizer, VOCAB, 16).of(req) == tuple(tokenizer("red shoes-x").input_ids)


def test_nothing_is_forced_where_no_grammar_has_a_say(tokenizer, grammars):
    thinking = after(grammars["reasoner"], [])
    finished = after(grammars["forcing"], tokenizer("r").input_ids)
    finished.finished = True
    ended = after(grammars["forcing"], [*tokenizer("red shoes-x").input_ids, EOS])
    reqs = [SimpleNamespace(grammar=grammar, output_ids=[9]) for grammar in (None, thinking, finished, ended)]
    assert [ForcedTokens(tokenizer, VOCAB, 16).of(req) for req in reqs] == [()] * 4


def test_forced_texts_are_encoded_as_inside_of_a_text():
    """Tokenizers of SentencePiece's kind put a space before a text: the forced one continues another."""
    pieces = {"▁": 0, "▁ab": 1, "ab": 2, "c": 3, "\n": 4, "▁c": 5, "<unk>": 6}
    inner = Tokenizer(models.BPE(pieces | {"a": 7, "b": 8}, [("a", "b")], unk_token="<unk>"))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    pieced = PreTrainedTokenizerFast(tokenizer_object=inner)
    forcing = SimpleNamespace(finished=False, is_terminated=lambda: False, try_jump_forward=lambda _: ([], "abc"))
    req = SimpleNamespace(grammar=forcing, output_ids=[9])
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
def test_forced_texts_end_before_the_letter_that_forks(tokenizer, regex, before, forced):
    """Alternatives that share their first byte: xgrammar forces half a letter, which is no text."""
    req = forced_by(tokenizer, XGrammarGrammarBackend(tokenizer, VOCAB, [EOS]).dispatch_regex(regex), before)
    ids = tokenizer(forced).input_ids
    expected = (req.output_ids[-1], *ids[:-1]) if len(ids) > 1 else ()
    assert ForcedTokens(tokenizer, VOCAB, 64).of(req) == expected


def test_nothing_is_forced_within_a_letter(tokenizer):
    """A token of one byte may end within a letter; what is forced behind it does not begin with one."""
    grammar = XGrammarGrammarBackend(tokenizer, VOCAB, [EOS]).dispatch_regex("да!")
    req = forced_by(tokenizer, grammar, "")
    grammar = after(grammar, tokenizer("д").input_ids[:1])
    assert ForcedTokens(tokenizer, VOCAB, 64).of(SimpleNamespace(grammar=grammar, output_ids=[9])) == ()
    assert len(ForcedTokens(tokenizer, VOCAB, 64).of(req)) == len(tokenizer("да!").input_ids)


def test_a_forced_text_is_read_as_far_as_a_step_can_use_it(tokenizer):
    """Of a long one the beginning; of one that takes the grammar too long to tell, no more than once."""
    xgrammar, llguidance = XGrammarGrammarBackend(tokenizer, VOCAB, [EOS]), GuidanceBackend(tokenizer, n_vocab=VOCAB)
    for backend in (xgrammar, llguidance):
        req = forced_by(tokenizer, backend.dispatch_regex("ab{9000}"), "a")
        assert ForcedTokens(tokenizer, VOCAB, 5).of(req)[:6] == (
            *tokenizer("a").input_ids,
            *tokenizer("bbbbb").input_ids,
        )
    encoded = []
    counting = SimpleNamespace(encode=lambda text, **_: encoded.append(len(text)) or tokenizer.encode(text))
    asked = []
    forcing = SimpleNamespace(
        finished=False, is_terminated=lambda: False, try_jump_forward=lambda _: asked.append(1) or ([], "b" * 10**6)
    )
    req = SimpleNamespace(grammar=forcing, output_ids=[9])
    for _ in range(3):
        ForcedTokens(counting, VOCAB, 5).of(req)
    assert len(asked) == 1 and max(encoded) < 200


def test_forced_tokens_end_before_one_that_the_target_does_not_have(tokenizer):
    for most, expected in ((VOCAB, "red shoes-"), (tokenizer("-").input_ids[0], "red shoes")):
        grammar = XGrammarGrammarBackend(tokenizer, VOCAB, [EOS]).dispatch_regex("x" + FORCED)
        req = forced_by(tokenizer, grammar, "xr")
        found = ForcedTokens(tokenizer, most, 16).of(req)
        assert found == tuple(tokenizer("r" + expected[1:]).input_ids)


def forced_by(tokenizer: Any, grammar: Any, text: str) -> Any:
    """A request whose text so far this is, behind another token."""
    ids = tokenizer(text).input_ids
    return SimpleNamespace(grammar=after(grammar, ids), output_ids=[9, *ids])
