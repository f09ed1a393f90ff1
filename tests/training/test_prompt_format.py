"""Prompts as the target's token ids, and the prompts that it invents, with the golden tokenizer of whole words."""

from pathlib import Path

import pytest
from dspark_training.prompt_format import PromptFormat
from transformers import AutoTokenizer

from sglang_dspark.errors import ConfigError

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "target"
STOP = frozenset({1})
# Turns end with another token (<mask>) than answers (<eos>).
TEMPLATE = (
    "{% for m in messages %}<pad> {{ m.content }} <mask> {% endfor %}"
    "{% if add_generation_prompt %}the {% if quiet %}quiet {% endif %}{% endif %}"
)


@pytest.fixture
def tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(GOLDEN)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def ids(tokenizer, words):
    return tokenizer.convert_tokens_to_ids(words.split())


def test_a_prompt_goes_through_the_template_or_as_it_is(tokenizer):
    assert PromptFormat(tokenizer).encode("red cat") == ids(tokenizer, "<pad> red cat <mask> the")
    quiet = PromptFormat(tokenizer, template_kwargs={"quiet": True})
    assert quiet.encode("red cat") == ids(tokenizer, "<pad> red cat <mask> the quiet")
    assert PromptFormat(tokenizer, raw=True).encode("red cat") == ids(tokenizer, "red cat")


def test_the_template_is_opened_at_the_user_turn(tokenizer):
    assert PromptFormat(tokenizer).open_user_turn() == ids(tokenizer, "<pad>")
    assert PromptFormat(tokenizer).open_user_turn(" red") == ids(tokenizer, "<pad> red")


def test_an_opening_and_what_follows_it_stay_apart(tokenizer, monkeypatch):
    prompt_format = PromptFormat(tokenizer)
    monkeypatch.setattr(tokenizer, "decode", lambda *arguments, **options: " red cat ")
    assert "the" + prompt_format.invented_turn([*ids(tokenizer, "red cat"), *STOP], STOP) == "the red cat"


@pytest.mark.parametrize(
    ("written", "turn"),
    [
        ("red cat <eos>", "red cat"),
        ("red cat <mask> the dog <eos>", "red cat"),
        ("red cat <mask> the dog", "red cat"),
        ("red cat", None),
        ("red <pad> cat <eos>", None),
        ("<eos>", ""),
    ],
)
def test_an_invented_turn_ends_where_the_template_ends_it(tokenizer, written, turn):
    assert PromptFormat(tokenizer).invented_turn(ids(tokenizer, written), STOP) == turn


def test_what_cannot_be_opened_is_refused(tokenizer):
    with pytest.raises(ConfigError, match="with --raw, give --prompts instead"):
        PromptFormat(tokenizer, raw=True).open_user_turn()
    tokenizer.chat_template = "{{ messages[0].content }} <mask>"
    with pytest.raises(ConfigError, match="puts nothing before the user's words"):
        PromptFormat(tokenizer).open_user_turn()
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="has no chat template; give --raw"):
        PromptFormat(tokenizer)
