"""Following a grammar along drafts: masks as if every row had been reached token by token, and the state left alone."""

from __future__ import annotations

from typing import Any

import pytest
from grammar_backends import EOS, THINK_END, VOCAB, Backends, after
from sglang_objects import request

from sglang_dspark.engine.logits_processing import grammar_masks

REGEX = "[ab]{2}(c|d)+e?"


@pytest.fixture(scope="module")
def backends(tmp_path_factory: pytest.TempPathFactory) -> Backends:
    return Backends(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(backends: Backends) -> Any:
    return backends.tokenizer


@pytest.fixture(scope="module")
def grammars(backends: Backends) -> dict[str, Any]:
    """A grammar of each engine at its start; to be copied."""
    return {
        "xgrammar": backends.xgrammar.dispatch_regex(REGEX),
        "reasoner": backends.reasoner(REGEX),
        "llguidance": backends.llguidance.dispatch_regex(REGEX),
    }


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
    reqs = [request(grammar=g) for g in (None, after(grammars[engine], before), None)]
    for _ in range(2):  # the second walk starts where the first one did
        found, masks = grammar_masks(reqs, [[5, 6], [7, *drafts], [8]], VOCAB)
        assert found == list(range(2, 2 + rows))
        for row, mask in enumerate(masks.tolist()):
            assert mask == mask_of(after(grammars[engine], [*before, *drafts[:row]]))


def test_a_grammar_without_a_say_masks_nothing(tokenizer, grammars):
    ended = after(grammars["xgrammar"], [*tokenizer("abc").input_ids, EOS])
    finished = after(grammars["xgrammar"], [])
    finished.finished = True
    reqs = [request(grammar=g) for g in (None, ended, finished)]
    assert grammar_masks(reqs, [[1], [1, 2], [1]], VOCAB) == ([], None)


def test_thinking_is_not_masked(tokenizer, grammars):
    """Before the end of its thoughts a reasoning model may write anything; the grammar begins behind them."""
    drafts = [*tokenizer("zz").input_ids, THINK_END, *tokenizer("ax").input_ids]
    _, masks = grammar_masks([request(grammar=after(grammars["reasoner"], []))], [[9, *drafts]], VOCAB)
    assert (masks[:3] == -1).all()
    assert len(masks) == 5  # up to the row that judges the x
    for row in (3, 4):
        assert masks[row].tolist() == mask_of(after(grammars["reasoner"], drafts[:row]))


def test_a_draft_that_no_tokenizer_knows_is_forbidden(grammars):
    """A model's vocabulary may be padded; llguidance has masks of its tokenizer's."""
    grammar = grammars["llguidance"].copy()
    rows, _ = grammar_masks([request(grammar=grammar)], [[9, VOCAB + 40, 5]], VOCAB + 64)
    assert rows == [0]
