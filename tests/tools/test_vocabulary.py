"""A drafter proposes the tokens of a list, made of the texts of its target's traffic."""

from byte_tokenizer import save_byte_tokenizer
from golden_server import TARGET
from transformers import AutoTokenizer

from sglang_dspark.draft.reduced_vocabulary import Tokens, Traffic, coverage
from sglang_dspark.tools.evaluation import Answer

TOKENS = Tokens(20, special=frozenset({0, 19}), of_bytes=frozenset({12, 13}))


def test_the_order_in_which_tokens_are_taken():
    """Special ones, those of answers and of prompts by their number, bytes, and the tokenizer's first."""
    traffic = Traffic(answers=[[7, 7, 8], [9, 9, 9, 19]], prompts=[[5, 5, 5, 5, 5], [4]])
    order = [0, 19, 9, 7, 8, 5, 4, 12, 13, 1, 2, 3, 6]
    for size in range(3, len(order) + 1):
        assert traffic.choose(TOKENS, size) == sorted(order[:size])


def test_coverage_of_answers_that_were_not_counted():
    answers = [[place] for place in range(2, 11)] + [[2, 2, 11]]
    assert Traffic(answers).held_out_coverage(TOKENS, 12) == 2 / 3
    assert Traffic(answers[:9]).held_out_coverage(TOKENS, 12) is None
    assert coverage([2, 3], [[2, 3], [4, 2]]) == 3 / 4
    assert coverage([2, 3], [[]]) is None


def test_tokens_of_a_target(tmp_path):
    """The tokenizer has a token more than the target, which no drafter proposes."""
    tokenizer = AutoTokenizer.from_pretrained(save_byte_tokenizer(tmp_path, marks=("<turn>",), beyond=("<beyond>",)))
    tokenizer.chat_template = "<turn>{{ messages[0].content }}<beyond>"
    tokens = Tokens.of(tokenizer, TARGET)
    assert (tokens.number, tokens.special) == (256, {0, 1, 2, 255})
    assert tokens.of_bytes == {*range(3, 255)}


def test_tokens_of_rounds():
    entries = [{"anchor": 5, "draft": [6, 7, 8], "accepted": 2}, None, None, {"anchor": 9, "draft": [], "accepted": 0}]
    assert Answer(entries, 5, stopped=True).tokens == [5, 6, 7, 9]
