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

from sglang_dspark.engine.scheduler.grammars import ForcedTokens, grammar_masks

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
    assert ForcedTokens(tokenizer).of(req) == expected


def test_tokens_that_llguidance_forces(tokenizer, grammars):
    req = SimpleNamespace(
        grammar=after(grammars["guided"], tokenizer("r").input_ids), output_ids=tokenizer("r").input_ids
    )
    assert ForcedTokens(tokenizer).of(req) == tuple(tokenizer("red shoes-x").input_ids)


def test_nothing_is_forced_where_no_grammar_has_a_say(tokenizer, grammars):
    thinking = after(grammars["reasoner"], [])
    finished = after(grammars["forcing"], tokenizer("r").input_ids)
    finished.finished = True
    ended = after(grammars["forcing"], [*tokenizer("red shoes-x").input_ids, EOS])
    reqs = [SimpleNamespace(grammar=grammar, output_ids=[9]) for grammar in (None, thinking, finished, ended)]
    assert [ForcedTokens(tokenizer).of(req) for req in reqs] == [()] * 4


def test_forced_texts_are_encoded_as_inside_of_a_text():
    """Tokenizers of SentencePiece's kind put a space before a text: the forced one continues another."""
    pieces = {"▁": 0, "▁ab": 1, "ab": 2, "c": 3, "\n": 4, "▁c": 5, "<unk>": 6}
    inner = Tokenizer(models.BPE(pieces | {"a": 7, "b": 8}, [("a", "b")], unk_token="<unk>"))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    pieced = PreTrainedTokenizerFast(tokenizer_object=inner)
    forcing = SimpleNamespace(finished=False, is_terminated=lambda: False, try_jump_forward=lambda _: ([], "abc"))
    req = SimpleNamespace(grammar=forcing, output_ids=[9])
    assert ForcedTokens(pieced).of(req) == (9, 2)
